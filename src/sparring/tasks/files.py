"""Readers of files (`formats`) whose rows are tasks, or conversations to imitate.

A row that does not parse is refused with its file and line. Columns are renamed by a mapping of our names to the
file's: `{"prompt": "question", "answer": "answer"}`; all other columns are kept as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.tasks.formats import check_plain, located, parsed
from sparring.types import Message, ToolCall

DEFAULT_COLUMNS = {"prompt": "prompt", "answer": "answer", "messages": "messages", "id": "id"}
ROLES = ("system", "user", "assistant", "tool")


def read_rows(path: str, columns: Mapping[str, str] = DEFAULT_COLUMNS) -> list[dict[str, Any]]:
    """Read the rows of a task file, with our column names.

    Args:
        path: a file, a folder or a hub name of any format that `formats.located` reads.
        columns: our name -> the file's, for any of prompt, answer, messages, id.

    Returns:
        every row with `id` (the line number where the file has none) and `prompt` (a text) or `messages` (a tuple of
            `Message` that does not end with the assistant).

    Raises:
        BadInput: the file does not exist, its format is unknown, or a row does not parse.
    """
    names = {**DEFAULT_COLUMNS, **columns}
    return [_task_row(row, names, where, number) for number, where, row in located(path)]


def read_conversations(
    path: str, columns: Mapping[str, str] = DEFAULT_COLUMNS, *, recorded: bool = False
) -> list[tuple[Message, ...]]:
    """Read conversations for supervised fine-tuning: the `messages` column, or `prompt` and `answer` as two messages.

    Args:
        recorded: whether a run recorded the conversations. Their replies may be empty, since the policy sampled them
            so.

    Raises:
        BadInput: see `read_rows`; or the assistant says nothing in a conversation, or has an empty reply.
    """
    names = {**DEFAULT_COLUMNS, **columns}
    return [_conversation(row, names, where, recorded) for _, where, row in located(path)]


def _task_row(row: dict[str, Any], names: Mapping[str, str], where: str, number: int) -> dict[str, Any]:
    renamed = _renamed(row, names)
    id = renamed.get("id")
    if id is not None and (isinstance(id, bool) or not isinstance(id, (str, int))):
        raise refusal(f"{where}, column {names['id']!r}", "a text or a whole number", repr(id)[:80], "correct the row")
    renamed["id"] = str(number if id is None else id)
    if isinstance(renamed.get("prompt"), list) and renamed.get("messages") is None:
        renamed["messages"] = renamed.pop("prompt")  # TRL's name of a column of conversations
    if renamed.get("messages") is not None:
        renamed["messages"] = messages = messages_of(renamed["messages"], where)
        if messages[-1].role == "assistant":
            raise refusal(
                where, "a conversation that waits for the assistant", "one that ends with it", "drop the reply"
            )
        check_said(messages, where)
    else:
        renamed.pop("messages", None)
        _text(renamed, "prompt", names, where)
    return renamed


def check_said(prompt: Sequence[Message], where: str) -> None:
    """Refuse a prompt whose messages are all blank, the system's left out (`BadInput`)."""
    if all(is_blank(message) for message in prompt if message.role != "system"):
        raise refusal(where, "a prompt that says something", "an empty one", "correct or remove the row")


def is_blank(message: Message) -> bool:
    """Return True if a message has neither a text nor a call."""
    return not message.content.strip() and not message.tool_calls


def _conversation(row: dict[str, Any], names: Mapping[str, str], where: str, recorded: bool) -> tuple[Message, ...]:
    renamed = _renamed(row, names)
    if renamed.get("messages") is None:
        return (
            Message(role="user", content=_text(renamed, "prompt", names, where)),
            Message(role="assistant", content=_text(renamed, "answer", names, where)),
        )
    messages = messages_of(renamed["messages"], where)
    for at, (message, entry) in enumerate(zip(messages, renamed["messages"], strict=True)):
        if message.role == "assistant" and is_blank(message) and entry.get("weight") != 0 and not recorded:
            actual, fix = f"content {entry.get('content')!r:.80} and no call", "correct or remove the row"
            raise refusal(f"{where}, messages[{at}]", "a reply with a text or a call", actual, fix)
    if all(message.role != "assistant" for message in messages):
        raise refusal(where, "an assistant message to learn", "none", "add one or remove the row")
    if messages[0].role == "assistant":
        raise refusal(
            f"{where}, messages[0]", "a question before the first reply", "a reply", "add one or remove the row"
        )
    return messages


def _renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    back = {column: name for name, column in names.items()}
    # If another column is mapped to one of our names, it replaces the file's own column of that name.
    kept = {key: value for key, value in row.items() if key in back or key not in names}
    return {back.get(key, key): value for key, value in kept.items()}


def _text(row: Mapping[str, Any], name: str, names: Mapping[str, str], where: str) -> str:
    if name not in row:
        raise refusal(
            where,
            f"a column {names[name]!r}",
            f"{', '.join(map(repr, row)) or 'none'}",
            f"map columns.{name} to the right one",
        )
    if not isinstance(row[name], str):
        raise refusal(f"{where}, column {names[name]!r}", "a text", repr(row[name])[:80], "write it as a string")
    if not row[name].strip():
        fix = "correct or remove the row"
        raise refusal(f"{where}, column {names[name]!r}", "a text that says something", repr(row[name])[:80], fix)
    text: str = row[name]
    return text


def messages_of(value: Any, where: str) -> tuple[Message, ...]:
    """Parse a list of {role, content, ...}, as chat APIs write messages; refuse any other value (`BadInput`)."""
    if not isinstance(value, list) or not value:
        raise refusal(f"{where}, messages", "a list of {role, content}", repr(value)[:80], "correct the row")
    return tuple(_message(entry, f"{where}, messages[{index}]") for index, entry in enumerate(value))


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict) or entry.get("role") not in ROLES:
        raise refusal(where, f"an object with role, one of {', '.join(ROLES)}", repr(entry)[:80], "correct the row")
    for name in ("content", "reasoning", "reasoning_content", "tool_call_id", "name"):
        if not isinstance(value := entry.get(name), (str, type(None))):
            raise refusal(f"{where}.{name}", "a text", repr(value)[:80], "write it as a string")
    calls = entry.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise refusal(f"{where}.tool_calls", "a list of calls", repr(calls)[:80], "correct the row")
    return Message(
        role=entry["role"],
        content=entry.get("content") or "",
        reasoning=entry.get("reasoning") or entry.get("reasoning_content"),
        tool_calls=tuple(_tool_call(call, i, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        tool_call_id=entry.get("tool_call_id"),
        name=entry.get("name"),
    )


def _tool_call(call: Any, index: int, where: str) -> ToolCall:
    """Parse a call in OpenAI's form, `{id, function: {name, arguments}}`, or the bare `{name, arguments}`. Arguments
    are an object or JSON text."""
    function = call.get("function") or call if isinstance(call, dict) else {}
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}.arguments", "JSON", "correct the row")
        check_plain(arguments, f"{where}.arguments")
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise refusal(where, "a name and arguments", repr(call)[:80], "correct the row")
    if not isinstance(call.get("id"), (str, type(None))):
        raise refusal(f"{where}.id", "a text", repr(call["id"])[:80], "write it as a string")
    return ToolCall(id=call.get("id") or f"call_{index}", name=function["name"], arguments=arguments)
