"""Replies of a policy without a model, on which agent programs are tried: those of the user's, else one call of each
tool that a request has, with values of its schema, and an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.generation import Constraint
from sparring.types import Message, ToolCall, ToolSpec

ANSWER = "This is the answer."
DEEPEST = 8
"""Schemas in each other of which values are made."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a reply, as far as its reply hangs on it."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    constraint: Constraint | None = None


WANTED: ContextVar[Wanted] = ContextVar("wanted")
"""The request that an engine is asked for by this task."""


class CallLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Call in a reply of a file."""

    name: str
    arguments: dict[str, Any] = {}


class ReplyLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of a file of replies."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[CallLine, ...] = ()


def read_replies(path: Path) -> tuple[Message, ...]:
    """Read replies, a JSON object a line: `content`, `reasoning`, and `tool_calls` with `name` and `arguments`.

    Raises:
        BadInput: there is no such file, a line is none, or there is no line.
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
    """Return what is said to a request where the user has no reply for it: what a constraint asks for, else a call of
    the first tool that the conversation has not called, else an answer."""
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


def value_of(schema: Any, depth: int = 0) -> Any:
    """Return a value that a JSON schema most likely takes: its own examples where it has any."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return "text"
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("enum", "examples"):
        if schema.get(name):
            return schema[name][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return value_of(schema[name][0], depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, Sequence) and not isinstance(kind, str) and kind else kind
    if kind == "object" or "properties" in schema:
        inner, required = schema.get("properties") or {}, schema.get("required") or ()
        return {name: value_of(inner.get(name), depth + 1) for name in required}
    if kind == "array":
        return [value_of(schema.get("items"), depth + 1)] * schema.get("minItems", 1)
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    plain = {"integer": least, "number": least, "boolean": True, "null": None}
    return plain.get(str(kind), "text")


def _calling(name: str, parameters: Mapping[str, Any]) -> Message:
    call = ToolCall(id="call_0", name=name, arguments=value_of({"type": "object", **parameters}))
    return Message(role="assistant", tool_calls=(call,))
