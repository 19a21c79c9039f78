"""Freeform tools of OpenAI's APIs: to the model a function of one text, answered as that text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.dialect import arguments_of, call_of, text_in
from sparring.types import ToolCall, ToolSpec

UNREADABLE = "unreadable_"
"""First letters of the id of a freeform call whose arguments are not the one text that the tool takes: its input is
what the model wrote in their place."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function that a request defines without one, as the vendor reads it."""

_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def freeform_tool(name: str, description: str, grammar: Mapping[str, Any] | None) -> ToolSpec:
    """Return a freeform tool as the model sees it.

    Args:
        name: that the model has for it.
        description: of the tool.
        grammar: `syntax` and `definition` of the text that it takes; None where it takes any.
    """
    if grammar is not None:
        kept = f"The input keeps to this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
        description = "\n\n".join(filter(None, (description, kept)))
    return ToolSpec(name=name, description=description, parameters=_PARAMETERS)


def freeform_call(id: str, name: str, input: str, where: str) -> ToolCall:
    """Return a call of a freeform tool as the client sends it back.

    Raises:
        BadInput: a text that UTF-8 cannot carry.
    """
    id, name, input = (text_in(text, where) for text in (id, name, input))
    if id.startswith(UNREADABLE):
        return call_of(id.removeprefix(UNREADABLE), name, input)
    return ToolCall(id=id, name=name, arguments={"input": input})


def freeform_input(call: ToolCall) -> tuple[str, str]:
    """Return the id and the text of a call, as the client gets them."""
    arguments = call.arguments
    if arguments is not None and arguments.keys() == {"input"} and isinstance(arguments["input"], str):
        return call.id, arguments["input"]
    return UNREADABLE + call.id, arguments_of(call)
