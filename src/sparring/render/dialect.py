"""Conversion of messages and tools to the dictionaries that chat templates and the `renderers` library take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparring.types import Message, ToolCall, ToolSpec
from sparring.validation import read_json

_NAME = re.compile(r'\s*(?:\{\s*"name"\s*:\s*"([^"\\\s]{1,128})"|<function=([^<>\s]{1,128})>)')
"""Beginning of a call with the name of its tool, in JSON and in tags."""

_CALL = re.compile(r'\s*(?:\{\s*"name"\s*:|<function=|<invoke name=|function<｜tool▁sep｜>|functions\.|call:)')
"""Beginning of the text of a whole call, in the formats that write the name inside that text."""

DEEPEST = 100
"""Maximum nesting of lists and objects in a call's arguments, since code that compares or writes arguments is
recursive."""

UNREAD = "INVALID_JSON"
"""Name of the argument that holds arguments which did not parse."""


def tool_dicts(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Convert tool schemas to the function-calling form that templates print."""
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
        }
        for t in tools
    ]


def message_dicts(
    messages: Sequence[Message], around: tuple[str, str] = ("<tool_call>\n", "\n</tool_call>")
) -> list[dict[str, Any]]:
    """Convert messages to the chat-completions form.

    The text of a malformed call is written back between the tags of the format if the text names the tool, or if the
    call has no name. Otherwise the text is only the arguments, as clients send them: the result is a call of the named
    tool with that text as its one argument, or without arguments if the text is blank.

    Args:
        around: text before and after a malformed call.
    """
    return [_message_dict(message, around) for message in messages]


def tool_call(id: str, name: Any, arguments: Any, raw: str) -> ToolCall:
    """Make a call from parsed parts. A call is malformed if it has no name, or if UTF-8 cannot encode one of its texts.
    A call is also malformed if its arguments are no JSON object, are nested deeper than `DEEPEST`, have NaN or an
    infinity, or stand under another key than the format's. A malformed call has `arguments` None and the text as it was
    written in `raw`. If no name is given, the call's `name` is the tool's name at the beginning of `raw`, or else
    ""."""
    named = isinstance(name, str) and bool(name) and _encodes(name)
    given = isinstance(arguments, Mapping) and (_can_be_given(arguments) if arguments else not _names_others(raw))
    if named and given:
        return ToolCall(id=id, name=name, arguments=arguments)
    begun = None if named else _NAME.match(raw)
    written = "" if begun is None else begun[1] or begun[2]
    return ToolCall(id=id, name=name if named else written, arguments=None, raw=raw)


def _can_be_given(arguments: Mapping[str, Any]) -> bool:
    try:
        text = json.dumps(arguments, ensure_ascii=False, default=str, allow_nan=False)
    except (ValueError, RecursionError):  # NaN, an infinity, or a number of thousands of digits, which no text has
        return False
    level: list[Any] = [arguments] if text.count("[") + text.count("{") > DEEPEST else []
    for _ in range(DEEPEST):
        level = [inner for outer in level if isinstance(outer, (Mapping, list, tuple)) for inner in _inside(outer)]
    return not level and _encodes(text)


def _names_others(raw: str) -> bool:
    """Return whether a call that was read without arguments is a JSON object with more than a name and an empty
    object: arguments under another format's key, such as `parameters`."""
    try:
        written = read_json(raw)
    except ValueError:
        return False
    return isinstance(written, dict) and len(written) > 1 and {} not in written.values()


def _inside(outer: Any) -> Iterable[Any]:
    return outer.values() if isinstance(outer, Mapping) else outer


def _arguments(call: ToolCall) -> Mapping[str, Any] | None:
    """Return the arguments to write for a call; None if its text is written back verbatim."""
    whole_call = not call.name or _CALL.match(call.raw) or call.raw.lstrip().startswith(call.name)
    if call.arguments is not None or whole_call:
        return call.arguments
    return {UNREAD: call.raw} if call.raw.strip() else {}


def _message_dict(message: Message, around: tuple[str, str]) -> dict[str, Any]:
    written = [(call, _arguments(call)) for call in message.tool_calls]
    malformed = [call.raw.join(around) for call, arguments in written if arguments is None]
    content = "\n".join(filter(None, [message.content, *malformed]))
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(arguments)}}
        for call, arguments in written
        if arguments is not None
    ]
    if calls:
        out["tool_calls"] = calls
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
