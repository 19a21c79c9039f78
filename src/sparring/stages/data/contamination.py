"""No held-out task is trained on: neither from a file, nor demonstrated, nor rolled out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from sparring.envs.splits import identity, identity_by_words, normalised, prompt_content
from sparring.errors import BadInput, refusal
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context
from sparring.stages.data.demonstrations import given_data
from sparring.store.sqlite import SqliteStore
from sparring.tasks.files import read_conversations
from sparring.tasks.preferences import read_preferences
from sparring.types import Message, Task

SHOWN = "prompts shown"
"""The store's key of what a run was trained on."""


def check_unseen(context: Context, tasks: Sequence[Task]) -> None:
    """Prove that no held-out task was trained on in this run, nor in those that it says it comes after.

    Raises:
        BadInput: one was.
    """
    check_unseen_files(context, tasks)
    texts = {same(task): task.id for same in (identity_by_words, identity) for task in tasks}  # early runs have words
    note_shown(context, texts)
    digests = {_digest(text): text for text in texts}
    for recipe, shown in _shown_earlier(context.config):
        if seen := digests.keys() & shown:
            do = "give both recipes one env.held_out_share"
            raise _trained_on(texts[digests[min(seen)]], f"a prompt of the run of {recipe}", do)


def note_shown(context: Context, held: Mapping[str, str]) -> None:
    """Note for the runs that come after this one which tasks were trained on, by digest, here and in the runs before.

    Args:
        context: of a run that has trained all that it trains.
        held: the identities of held-out tasks, and which they are.

    Raises:
        BadInput: one of these was trained on here.
    """
    shown = {_digest(text) for _, prompts in _asked(context) for text in prompts}
    for text, what in _shown(context):
        if text in held:
            raise _trained_on(held[text], what)
        shown.add(_digest(text))
    context.store.put(SHOWN, sorted(shown.union(*(digests for _, digests in _shown_earlier(context.config)))))


def _shown(context: Context) -> Iterator[tuple[str, str]]:
    """Yield the identity of every task that this run was shown, and which it is."""
    for index in range((context.done("collect") or {}).get("tasks", 0)):
        collected = context.store.get(f"collect/{index}")
        assert collected is not None  # the stage is done, with so many
        identifier = collected.get("identity") or normalised(collected["prompt"])
        yield identifier, f"the task of a trace, {collected['prompt'][:60]!r}"
    for stage in ("rl", "distill"):
        yield from ((identity(group.task), group.task.id) for group in context.store.groups(stage=stage))
    if context.done("sft") is None or given_data(context) is not None:
        return
    source = context.factory.tasks("demonstration", context.config.run.seed)
    while (task := source.next()) is not None:
        yield identity(task), task.id


def _shown_earlier(config: RunConfig) -> Iterator[tuple[str, set[int]]]:
    """Yield the training prompts that each earlier run of `run.after` recorded. A missing run has recorded none."""
    for recipe in config.run.after:
        before = load(recipe).run
        file = Path(before.directory) / before.name / "store.sqlite"
        if not file.is_file():
            continue
        store = SqliteStore(file, read_only=True)
        try:
            yield recipe, set(store.get(SHOWN) or ())
        finally:
            store.close()


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def check_unseen_files(context: Context, tasks: Sequence[Task]) -> None:
    """Refuse rows of `[sft] data` and `[preference] data`, which exist before anything runs, that show a held-out task.
    A row shows a task if its prompt is that task's, or if one of its user messages is the last of that task and of no
    other. A task with a key of its own is not compared by text.

    Raises:
        BadInput: a row does.
    """
    keyless = [task for task in tasks if not task.key]
    last = Counter(_last(task) for task in keyless)
    texts = {text: task.id for task in keyless if last[text := _last(task)] == 1 and text}
    texts |= {identity(task): task.id for task in keyless}
    for where, prompts in _asked(context):
        for text in prompts:
            if text in texts:
                raise _trained_on(texts[text], where, "take that row out of the file")


def _asked(context: Context) -> Iterator[tuple[str, list[str]]]:
    """Yield, for each row of a file that the run trains on, its place and the texts that may be a task's prompt."""
    for where, prompt in _rows(context):
        users = (normalised(message.content) for message in prompt if message.role == "user")
        yield where, [prompt_content(_before_reply(prompt)), *users]


def _rows(context: Context) -> Iterator[tuple[str, Sequence[Message]]]:
    """Yield, for each row of a file that the run trains on, its place and messages; of a preference its prompt."""
    config = context.config
    if "sft" in config.run.stages and config.sft.data is not None:
        rows = read_conversations(config.sft.data, config.world.columns.mapping())
        yield from ((f"{config.sft.data}, row {number}", messages) for number, messages in enumerate(rows, 1))
    if "preference" in config.run.stages and config.preference.data is not None:
        yield from ((row.where, row.prompt) for row in read_preferences(config.preference.data, single=True))


def _before_reply(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[: next((place for place, message in enumerate(messages) if message.role == "assistant"), None)]


def _last(task: Task) -> str:
    """Return the last message of the user, normalised; "" where there is none."""
    return normalised(next((message.content for message in reversed(task.messages) if message.role == "user"), ""))


def _trained_on(task: str, got: str, do: str = "change the splits of the environment") -> BadInput:
    return refusal(f"held-out task {task}", "a task that is in no training data", got, do)
