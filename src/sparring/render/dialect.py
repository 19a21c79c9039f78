"""Our neutral messages <-> the dictionaries that chat templates and the `renderers` library take. The one place for
it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.types import Message, ToolCall, ToolSpec

_NAME = re.compile(r'\s*(?:\{\s*"name"\s*:\s*"([^"\\\s]{1,128})"|<function=([^<>\s]{1,128})>)')
"""Beginning of a call that names its tool, in JSON and in tags."""


def tool_dicts(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Convert tool schemas to the function-calling form that templates print."""
    return [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
        }
        for t in tools
    ]


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the chat-completions form. A malformed tool call goes back into the text it was written
    as."""
    return [_message_dict(message) for message in messages]


def tool_call(id: str, name: Any, arguments: Any, raw: str) -> ToolCall:
    """Make a call of parsed parts. A call that no tool could be given (no name, arguments that are no JSON object, text
    that UTF-8 cannot carry) is malformed: `arguments` is None, `raw` keeps what was written, and `name` is what that
    begins with, where it names a tool."""
    named = isinstance(name, str) and bool(name) and _encodes(name)
    if named and isinstance(arguments, Mapping) and _encodes(json.dumps(arguments, ensure_ascii=False, default=str)):
        return ToolCall(id=id, name=name, arguments=arguments)
    begun = None if named else _NAME.match(raw)
    written = "" if begun is None else begun[1] or begun[2]
    return ToolCall(id=id, name=name if named else written, arguments=None, raw=raw)


def _message_dict(message: Message) -> dict[str, Any]:
    malformed = [f"<tool_call>\n{call.raw}\n</tool_call>" for call in message.tool_calls if call.arguments is None]
    content = "\n".join(filter(None, [message.content, *malformed]))
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call in message.tool_calls
        if call.arguments is not None
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
