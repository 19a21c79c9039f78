"""Freeform tools of OpenAI's APIs. The model sees each as a function with one text argument; the client gets that
text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.gateway.dialects.dialect import arguments_of, call_of, text_in
from sparring.types import ToolCall, ToolSpec

UNREADABLE = "unreadable_"
"""Prefix of the id of a freeform call whose arguments are not the one text. Its input is the text that the model
wrote."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function that a request defines without a schema."""

_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def freeform_tool(name: str, description: str, grammar: Mapping[str, Any] | None) -> ToolSpec:
    """Return a freeform tool as the model sees it.

    Args:
        name: name for the model.
        description: description of the tool.
        grammar: `syntax` and `definition` of the input; None if any text is allowed.
    """
    if grammar is not None:
        kept = f"The input keeps to this grammar ({grammar.get('syntax')}):\n{grammar.get('definition')}"
        description = "\n\n".join(filter(None, (description, kept)))
    return ToolSpec(name=name, description=description, parameters=_PARAMETERS)


def freeform_call(id: str, name: str, input: str, where: str) -> ToolCall:
    """Return a call of a freeform tool from a conversation.

    Raises:
        BadInput: UTF-8 cannot encode a text.
    """
    id, name, input = (text_in(text, where) for text in (id, name, input))
    if id.startswith(UNREADABLE):
        return call_of(id.removeprefix(UNREADABLE), name, input)
    return ToolCall(id=id, name=name, arguments={"input": input})


def freeform_input(call: ToolCall) -> tuple[str, str]:
    """Return the id and the input text of a call, as the client gets them."""
    arguments = call.arguments
    if arguments is not None and arguments.keys() == {"input"} and isinstance(arguments["input"], str):
        return call.id, arguments["input"]
    return UNREADABLE + call.id, arguments_of(call)
