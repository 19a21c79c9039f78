"""Check that no held-out task is trained on: not from a file, a demonstration or a rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from sparring.envs.splits import identity, normalised, prompt_content
from sparring.errors import BadInput, refusal
from sparring.protocols import EnvFactory
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import RunFiles
from sparring.stages.data.demonstrations import conversation_file
from sparring.store.sqlite import SqliteStore
from sparring.tasks.files import read_conversations
from sparring.tasks.preferences import read_preferences
from sparring.types import Message, Task

SHOWN = "prompts shown"
"""Key in the store: digests of all prompts that the run trained on."""


def check_unseen(files: RunFiles, factory: EnvFactory, tasks: Sequence[Task]) -> None:
    """Check that neither this run nor the runs of `run.after` trained on a held-out task."""
    check_unseen_files(files.config, tasks)
    texts = {identity(task): task.id for task in tasks}
    note_shown(files, factory, texts)
    digests = {_digest(text): text for text in texts}
    for recipe, prompts in _earlier_prompts(files.config):
        if seen := digests.keys() & prompts:
            fix = "give both recipes one env.held_out_share"
            raise _contaminated(texts[digests[min(seen)]], f"a prompt of the run of {recipe}", fix)


def note_shown(files: RunFiles, factory: EnvFactory, held_out: Mapping[str, str]) -> None:
    """Record digests of the tasks that this run and the runs of `run.after` trained on, for later runs.

    Args:
        held_out: ids of held-out tasks by `identity(task)`.

    Raises:
        BadInput: this run trained on a held-out task.
    """
    digests = {_digest(text) for _, prompts in _prompts_in_files(files.config) for text in prompts}
    for text, what in _tasks_shown(files, factory):
        if text in held_out:
            raise _contaminated(held_out[text], what)
        digests.add(_digest(text))
    files.store.put(SHOWN, sorted(digests.union(*(earlier for _, earlier in _earlier_prompts(files.config)))))


def _tasks_shown(files: RunFiles, factory: EnvFactory) -> Iterator[tuple[str, str]]:
    for index in range((files.done("collect") or {}).get("tasks", 0)):
        collected = files.store.get(f"collect/{index}")
        assert collected is not None  # the stage is done, with so many
        yield collected["identity"], f"the task of a trace, {collected['prompt'][:60]!r}"
    for stage in ("rl", "distill"):
        yield from ((identity(group.task), group.task.id) for group in files.store.groups(stage=stage))
    if files.done("sft") is None or conversation_file(files) is not None:
        return
    source = factory.tasks("demonstration", files.config.run.seed)
    while (task := source.next()) is not None:
        yield identity(task), task.id


def _earlier_prompts(config: RunConfig) -> Iterator[tuple[str, set[int]]]:
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


def check_unseen_files(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Refuse rows of `[sft] data` and `[preference] data` that show a held-out task.

    A row shows a task if the row has the task's prompt, or if a user message of the row is the last user message of
    that task and of no other held-out task. Tasks with a `Task.key` are not compared.
    """
    keyless = [task for task in tasks if not task.key]
    last = Counter(_last_user_message(task) for task in keyless)
    texts = {text: task.id for task in keyless if last[text := _last_user_message(task)] == 1 and text}
    texts |= {identity(task): task.id for task in keyless}
    for where, prompts in _prompts_in_files(config):
        for text in prompts:
            if text in texts:
                raise _contaminated(texts[text], where, "take that row out of the file")


def _prompts_in_files(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    for where, prompt in _rows_in_files(config):
        users = (normalised(message.content) for message in prompt if message.role == "user")
        yield where, [prompt_content(_before_reply(prompt)), *users]


def _rows_in_files(config: RunConfig) -> Iterator[tuple[str, Sequence[Message]]]:
    """Yield file and row number, and the messages, of each row in the training files. Of a preference row, only the
    prompt is yielded."""
    if "sft" in config.run.stages and config.sft.data is not None:
        rows = read_conversations(config.sft.data, config.world.columns.mapping())
        yield from ((f"{config.sft.data}, row {number}", messages) for number, messages in enumerate(rows, 1))
    if "preference" in config.run.stages and config.preference.data is not None:
        yield from ((row.where, row.prompt) for row in read_preferences(config.preference.data, single=True))


def _before_reply(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[: next((place for place, message in enumerate(messages) if message.role == "assistant"), None)]


def _last_user_message(task: Task) -> str:
    return normalised(next((message.content for message in reversed(task.messages) if message.role == "user"), ""))


def _contaminated(task: str, actual: str, fix: str = "change the splits of the environment") -> BadInput:
    return refusal(f"held-out task {task}", "a task that is in no training data", actual, fix)
