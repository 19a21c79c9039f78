"""Tools of OpenAI's chat completions. The model sees functions and freeform tools as functions; a client gets a call in
the form of its tool."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sparring.errors import refusal
from sparring.gateway.dialects.fields import arguments_of, call_of, name_in, objects_in, optional, typed
from sparring.gateway.dialects.openai import NO_PARAMETERS, freeform_call, freeform_input, freeform_tool
from sparring.types import ToolCall, ToolSpec

KINDS = ("function", "custom")
"""Types of tools that a client runs; `custom` is a freeform tool."""


def tools_in(tools: Any) -> tuple[tuple[ToolSpec, ...], frozenset[str]]:
    """Read the tools of a request.

    Returns:
        Tools as the model sees them, and the names of the freeform tools.

    Raises:
        BadInput: a tool is malformed or hosted by the vendor, or a function and a freeform tool have the same name.
    """
    specs: list[ToolSpec] = []
    kinds: dict[str, str] = {}
    for where, tool in objects_in([] if tools is None else tools, "tools", "a list of tools", "a tool"):
        kind = tool.get("type")
        if kind not in KINDS:
            raise refusal(f"{where}.type", '"function" or "custom"', repr(kind), "leave it out")
        spec = _read_tool(
            typed(tool.get(kind), f"{where}.{kind}", dict, "a tool's description"), kind, f"{where}.{kind}"
        )
        if kinds.setdefault(spec.name, kind) != kind:
            raise refusal(where, "tools of different names", f"{spec.name!r} twice", "rename one")
        specs.append(spec)
    return tuple(specs), frozenset(name for name, kind in kinds.items() if kind == "custom")


def read_call(data: Mapping[str, Any], where: str) -> ToolCall:
    """Read a call in a conversation."""
    kind = "custom" if data.get("type") == "custom" else "function"
    inner = typed(data.get(kind), f"{where}.{kind}", dict, "a tool's name and what it is given")
    id = typed(data.get("id"), f"{where}.id", str, "an id")
    name = typed(inner.get("name"), f"{where}.{kind}.name", str, "a name")
    if kind == "custom":
        return freeform_call(id, name, typed(inner.get("input"), f"{where}.custom.input", str, "text"))
    arguments = optional(inner, "arguments", str, "JSON as text", "", f"{where}.function.")
    return call_of(id, name, arguments)


def write_call(call: ToolCall, freeform: Collection[str]) -> dict[str, Any]:
    """Write a call in the form of its tool."""
    if call.name in freeform:
        id, input = freeform_input(call)
        return {"id": id, "type": "custom", "custom": {"name": call.name, "input": input}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}


def _read_tool(tool: Mapping[str, Any], kind: str, where: str) -> ToolSpec:
    name = name_in(tool.get("name"), f"{where}.name")
    description = typed(tool.get("description") or "", f"{where}.description", str, "text")
    if kind == "function":
        parameters = optional(tool, "parameters", dict, "a JSON schema", NO_PARAMETERS, f"{where}.")
        return ToolSpec(name=name, description=description, parameters=parameters)
    format = typed(tool.get("format") or {"type": "text"}, f"{where}.format", dict, "a format")
    grammar = None
    if format.get("type") == "grammar":
        grammar = typed(format.get("grammar"), f"{where}.format.grammar", dict, "a grammar")
    return freeform_tool(name, description, grammar)


def tool_name(choice: Mapping[str, Any], where: str) -> str:
    """Return the name of the tool in an object of `tool_choice`."""
    kind = "custom" if choice.get("type") == "custom" else "function"
    tool = typed(choice.get(kind), f"{where}.{kind}", dict, "a tool")
    return str(typed(tool.get("name"), f"{where}.{kind}.name", str, "a name"))
