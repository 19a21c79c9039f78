"""No held-out prompt is trained on: neither from a file, nor demonstrated, nor rolled out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sparring.envs.splits import normalised, prompt_key
from sparring.errors import BadInput, refusal
from sparring.stages.context import Context
from sparring.stages.demonstrate import given_data
from sparring.tasks.files import read_conversations
from sparring.tasks.preferences import read_preferences
from sparring.types import Message, Task


def check_unseen(context: Context, tasks: Sequence[Task]) -> None:
    """Prove that no held-out prompt text was trained on in this run.

    Raises:
        BadInput: one was.
    """
    check_unseen_files(context, tasks)
    texts = {prompt_key(task): task.id for task in tasks}
    for index in range((context.done("collect") or {}).get("tasks", 0)):
        prompt = context.store.get(f"collect/{index}")["prompt"]
        if normalised(prompt) in texts:
            raise _trained_on(texts[normalised(prompt)], f"the prompt of a trace, {prompt[:60]!r}")
    trained = [group.task for stage in ("rl", "distill") for group in context.store.groups(stage=stage)]
    source = context.factory.tasks("demonstration", context.config.run.seed)
    while context.done("sft") is not None and given_data(context) is None and (task := source.next()) is not None:
        trained.append(task)
    for task in trained:
        if prompt_key(task) in texts:
            raise _trained_on(texts[prompt_key(task)], f"the prompt of {task.id}")


def check_unseen_files(context: Context, tasks: Sequence[Task]) -> None:
    """The same of `[sft] data` and `[preference] data`, which are there before anything runs. A row asks for a held-out task
    where its prompt is that task's, or where one of its user's messages is the last of that task and of no other.

    Raises:
        BadInput: a row does.
    """
    last = Counter(_last(task) for task in tasks)
    texts = {text: task.id for task in tasks if last[text := _last(task)] == 1 and text}
    texts |= {prompt_key(task): task.id for task in tasks}
    for where, prompt in _rows(context):
        asked = [_text(_before_reply(prompt)), *(normalised(message.content) for message in prompt if message.role == "user")]
        for text in asked:
            if text in texts:
                raise _trained_on(texts[text], where, "take that row out of the file")


def _rows(context: Context) -> Iterator[tuple[str, Sequence[Message]]]:
    """Where a row of a file stands that the run trains on, and its messages; of a preference the prompt's."""
    config = context.config
    if "sft" in config.run.stages and config.sft.data is not None:
        rows = read_conversations(config.sft.data, config.env.columns.mapping())
        yield from ((f"{config.sft.data}, row {number}", messages) for number, messages in enumerate(rows, 1))
    if "preference" in config.run.stages and config.preference.data is not None:
        yield from ((row.where, row.prompt) for row in read_preferences(config.preference.data, single=True))


def _before_reply(messages: Sequence[Message]) -> Sequence[Message]:
    """What stands before the first word of the assistant."""
    return messages[: next((place for place, message in enumerate(messages) if message.role == "assistant"), None)]


def _last(task: Task) -> str:
    """What the user says at last, "" where that is nothing."""
    return normalised(next((message.content for message in reversed(task.messages) if message.role == "user"), ""))


def _text(messages: Sequence[Message]) -> str:
    return normalised(" ".join(message.content for message in messages))


def _trained_on(task: str, got: str, do: str = "change the splits of the environment") -> BadInput:
    return refusal(f"held-out task {task}", "a prompt that no training stream holds", got, do)
