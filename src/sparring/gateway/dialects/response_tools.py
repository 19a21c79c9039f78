"""Tools of OpenAI's Responses. The model sees functions, freeform tools and tools in namespaces as functions; a client
gets a call in the form of its tool."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparring.errors import refusal
from sparring.gateway.dialects.dialect import is_left_out
from sparring.gateway.dialects.fields import (
    arguments_of,
    call_of,
    name_in,
    objects_in,
    optional,
    text_field,
    typed,
)
from sparring.gateway.dialects.openai import NO_PARAMETERS, freeform_call, freeform_input, freeform_tool
from sparring.types import ToolCall, ToolSpec

HOSTED = frozenset(
    "web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 file_search computer"
    " computer_use_preview code_interpreter image_generation mcp local_shell shell apply_patch tool_search"
    " programmatic_tool_calling".split()
)
"""Types of tools that the vendor hosts, or that only the vendor's models can call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """Form in which a client gets the calls of a tool.

    Attributes:
        kind: `function` has arguments, `custom` is a freeform tool with one text.
        name: client's name for the tool.
        namespace: namespace of the tool; None if the tool has no namespace.
    """

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def tools_in(tools: Any, leave_out: Collection[str]) -> tuple[tuple[ToolSpec, ...], dict[str, ToolForm]]:
    """Read the tools of a request.

    Returns:
        Tools as the model sees them, and the form of each tool, by the model's name for the tool.

    Raises:
        BadInput: a tool is malformed or not run by the client, or two tools have the same name.
    """
    specs: list[ToolSpec] = []
    forms: dict[str, ToolForm] = {}
    for place, tool in objects_in([] if tools is None else tools, "tools", "a list of tools", "a tool"):
        kind = tool.get("type")
        if kind == "namespace":
            namespace = typed(tool.get("name"), f"{place}.name", str, "a name")
            inner = typed(tool.get("tools"), f"{place}.tools", list, "a list of tools")
            described = _description(tool, place)
            pairs = [
                _read_tool(each, f"{place}.tools[{n}]", namespace, described if n == 0 else "")
                for n, each in enumerate(inner)
            ]
        elif kind in ("function", "custom"):
            pairs = [_read_tool(tool, place, None, "")]
        elif is_left_out(kind, leave_out):
            continue
        else:
            do = "switch it off in the client, or let the door leave it out" if str(kind) in HOSTED else "leave it out"
            raise refusal(f"{place}.type", "function, custom or namespace: tools that the client runs", repr(kind), do)
        for spec, form in pairs:
            if spec.name in forms:
                raise refusal(place, "tools of different names", f"{spec.name!r} twice", "rename one")
            forms[spec.name] = form
            specs.append(spec)
    return tuple(specs), forms


def model_name(name: str, namespace: str | None) -> str:
    """Return the model's name for a tool."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_call(item: Mapping[str, Any], where: str) -> ToolCall:
    """Read a call in a conversation."""
    name = model_name(text_field(item, "name", where, "a name"), _namespace(item, where))
    id = text_field(item, "call_id", where, "an id")
    if item.get("type") == "function_call":
        arguments = optional(item, "arguments", str, "JSON as text", "", f"{where}.")
        return call_of(id, name, arguments)
    input = typed(item.get("input"), f"{where}.input", str, "text")
    return freeform_call(id, name, input)


def write_call(call: ToolCall, forms: Mapping[str, ToolForm]) -> dict[str, Any]:
    """Write a call as an item in the form of its tool, without the item's id."""
    form = forms.get(call.name, ToolForm(kind="function", name=call.name))
    namespace = {} if form.namespace is None else {"namespace": form.namespace}
    if form.kind == "function":
        named = {"call_id": call.id, "name": form.name, **namespace}
        return {"type": "function_call", **named, "arguments": arguments_of(call)}
    id, input = freeform_input(call)
    return {"type": "custom_tool_call", "call_id": id, "name": form.name, **namespace, "input": input}


def _read_tool(tool: Any, where: str, namespace: str | None, before: str) -> tuple[ToolSpec, ToolForm]:
    """Return a tool as the model sees it, and its form. `before`: prefix of the tool's description."""
    kind = typed(tool, where, dict, "a tool").get("type")
    if kind not in ("function", "custom"):
        raise refusal(f"{where}.type", "function or custom", repr(kind), "leave it out")
    name = name_in(tool.get("name"), f"{where}.name")
    form = ToolForm(kind=kind, name=name, namespace=namespace)
    description = "\n\n".join(filter(None, (before, _description(tool, where))))
    model_tool = model_name(name, namespace)
    if kind == "function":
        parameters = optional(tool, "parameters", dict, "a JSON schema", NO_PARAMETERS, f"{where}.")
        return ToolSpec(name=model_tool, description=description, parameters=parameters), form
    format = typed(tool.get("format") or {"type": "text"}, f"{where}.format", dict, "a format")
    return freeform_tool(model_tool, description, format if format.get("type") == "grammar" else None), form


def _description(tool: Mapping[str, Any], where: str) -> str:
    return str(typed(tool.get("description") or "", f"{where}.description", str, "text"))


def name_of(forms: Mapping[str, ToolForm], tool: Mapping[str, Any], where: str) -> str:
    """Return the model's name for a tool that a client names.

    Raises:
        BadInput: the request has no such tool.
    """
    name = text_field(tool, "name", where, "the name of a tool")
    model_tool = model_name(name, _namespace(tool, where))
    if model_tool not in forms:
        raise refusal(where, "a tool of the request", json.dumps(name), "name one that is there")
    return model_tool


def _namespace(item: Mapping[str, Any], where: str) -> str | None:
    namespace: str | None = optional(item, "namespace", str, "a name", None, f"{where}.")
    return namespace
