"""Replies of a scripted policy, for trials of agent programs. The user's replies come first; then each tool of a
request is called once with values that fit its schema, and then an answer is given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.generation import Constraint
from sparring.render.calls.samples import value_of
from sparring.types import Message, ToolCall, ToolSpec

ANSWER = "This is the answer."


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a request that decide its scripted reply."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    constraint: Constraint | None = None


WANTED: ContextVar[Wanted] = ContextVar("wanted")
"""Request of the current asyncio task."""


class CallLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tool call in a file of replies."""

    name: str
    arguments: dict[str, Any] = {}


class ReplyLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of a file of replies."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[CallLine, ...] = ()


def read_replies(path: Path) -> tuple[Message, ...]:
    """Read a file of replies. Each line is a JSON object: `content`, `reasoning`, and `tool_calls` with `name` and
    `arguments`.

    Raises:
        BadInput: the file is missing or empty, or a line is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(str(path), "a file of replies", str(error), "correct --replies") from None
    replies = []
    for number, line in enumerate(lines, 1):
        try:
            reply = msgspec.json.decode(line, type=ReplyLine)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            expected = 'a JSON object such as {"content": "Yes."}'
            raise refusal(f"{path}:{number}", expected, str(error), "correct the line") from None
        calls = tuple(
            ToolCall(id=f"call_{at}", name=call.name, arguments=call.arguments)
            for at, call in enumerate(reply.tool_calls)
        )
        replies.append(Message(role="assistant", content=reply.content, reasoning=reply.reasoning, tool_calls=calls))
    if not replies:
        raise refusal(str(path), "a line for each reply", "none", "add one")
    return tuple(replies)


def said_to(wanted: Wanted) -> Message:
    """Return the scripted reply to a request: a text that fits the request's constraint, else a call of the first tool
    that the conversation has not called, else an answer."""
    constraint = wanted.constraint
    if constraint is not None and constraint.kind == "json_schema":
        value = value_of(json.loads(constraint.source))
        return Message(role="assistant", content=json.dumps(value, ensure_ascii=False))
    if constraint is not None and constraint.kind == "tool_call":
        named = json.loads(constraint.source)
        if not named.get("text"):
            tool = named["tools"][0]
            return _calling(tool["name"], tool["parameters"])
    called = {call.name for message in wanted.messages for call in message.tool_calls}
    tool = next((tool for tool in wanted.tools if tool.name not in called), None)
    return Message(role="assistant", content=ANSWER) if tool is None else _calling(tool.name, tool.parameters)


def _calling(name: str, parameters: Mapping[str, Any]) -> Message:
    call = ToolCall(id="call_0", name=name, arguments=value_of({"type": "object", **parameters}))
    return Message(role="assistant", tool_calls=(call,))
