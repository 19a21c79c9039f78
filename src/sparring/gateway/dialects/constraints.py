"""Constraints on replies: response formats that a client asks for, and choices that force or restrict calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.fields import typed
from sparring.generation import Constraint
from sparring.types import ToolSpec

JSON_OBJECT = Constraint(kind="json_schema", source='{"type":"object"}')
"""Constraint of a reply that is any JSON object."""

KINDS = ("text", "json_object", "json_schema")
"""Types of response formats in OpenAI's APIs."""


def format_in(format: Any, where: str, *, kinds: Sequence[str] = KINDS, inside: str = "") -> Constraint | None:
    """Return the constraint of a response format, or None if the reply is free text.

    Args:
        format: field of the request; None if the request has no such field.
        where: place of the field.
        kinds: types that this API has.
        inside: field of the format that contains the schema; empty if the format itself has the schema.

    Raises:
        BadInput: the format is malformed or has another type.
    """
    if format is None:
        return None
    kind = typed(format, where, dict, "a format").get("type")
    if kind not in kinds:
        raise refusal(f"{where}.type", " or ".join(kinds), repr(kind), "correct the request")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if inside:
        where = f"{where}.{inside}"
        format = typed(format.get(inside), where, dict, "a schema with a name")
        if format.get("schema") is None:
            return JSON_OBJECT
    return schema_in(format.get("schema"), f"{where}.schema")


def schema_in(schema: Any, where: str) -> Constraint:
    """Return the constraint of a JSON schema."""
    return Constraint(kind="json_schema", source=json.dumps(typed(schema, where, dict, "a JSON schema")))


def forced_call(
    tools: Sequence[ToolSpec], names: Sequence[str] | None = None, *, parallel: bool = True, where: str = "tool_choice"
) -> Constraint:
    """Return the constraint of a reply that must call.

    Args:
        names: names of the tools that may be called; None: all tools.
        parallel: whether the reply may have several calls.
    """
    return _constraint(_choose(tools, names, where), parallel, text=False)


def allowed_calls(
    tools: Sequence[ToolSpec],
    names: Sequence[str],
    *,
    parallel: bool = True,
    validated: bool = False,
    where: str = "tool_choice",
) -> Constraint | None:
    """Return the constraint of a reply that is text or calls only the tools in `names`. None if all tools may be called
    and `validated` is false.

    The prompt shows all tools regardless, so that it continues the conversation.

    Args:
        validated: whether arguments must match their schemas, even if all tools may be called.
    """
    chosen = _choose(tools, names, where)
    return None if len(chosen) == len(tools) and not validated else _constraint(chosen, parallel, text=True)


def _choose(tools: Sequence[ToolSpec], names: Sequence[str] | None, where: str) -> list[ToolSpec]:
    by_name = {tool.name: tool for tool in tools}
    for name in names or ():
        if typed(name, where, str, "the name of a tool") not in by_name:
            got = json.dumps(name, ensure_ascii=False)
            raise refusal(where, "the name of a tool of the request", got, "name one that is there")
    chosen = list(tools) if names is None else [by_name[name] for name in dict.fromkeys(names)]
    if not chosen:
        raise refusal(where, "a tool that may be called", "none", "send tools, or leave the choice to the policy")
    return chosen


def _constraint(tools: Sequence[ToolSpec], parallel: bool, text: bool) -> Constraint:
    listed = [{"name": tool.name, "parameters": dict(tool.parameters)} for tool in tools]
    return Constraint(kind="tool_call", source=json.dumps({"tools": listed, "parallel": parallel, "text": text}))
