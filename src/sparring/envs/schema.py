"""A Python function's type hints and docstring -> the tool schema that the model reads; checks of a call's arguments
and of `[env.args]`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sparring.errors import refusal
from sparring.types import ToolSpec
from sparring.validation import InvalidValue, convert

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def tool_spec(function: Callable[..., Any], *, name: str | None = None, description: str | None = None) -> ToolSpec:
    """Return the tool as the model sees it: name, first paragraph of the docstring, JSON schema of the parameters.

    Args:
        function: a function or bound method; every parameter needs a type hint. Argument descriptions come from the
            `Args:` part of a Google-style docstring.
        name: name of the tool for the model; the function's own name by default.
        description: replaces the docstring's first paragraph.

    Raises:
        BadInput: a parameter has no type hint, or a type hint without a JSON schema.
    """
    where = f"tool {name or function.__name__}"
    text = inspect.getdoc(function) or ""
    notes = _argument_notes(text)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, (annotation, default) in parameters(function, where).items():
        schema = schema_of(annotation, f"{where}, parameter {key}")
        if key in notes:
            schema["description"] = notes[key]
        if default is inspect.Parameter.empty:
            required.append(key)
        elif default is not None:
            schema["default"] = msgspec.to_builtins(default)
        properties[key] = schema
    return ToolSpec(
        name=name or function.__name__,
        description=description if description is not None else _first_paragraph(text),
        parameters={"type": "object", "properties": properties, "required": required},
    )


def parameters(function: Callable[..., Any], where: str) -> dict[str, tuple[Any, Any]]:
    """Return parameter name -> (type, default or `inspect.Parameter.empty`), in order, without a method's `self`.

    Raises:
        BadInput: a parameter has no type hint, or the hint names something that does not exist.
    """
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise refusal(
            where, "type hints that can be resolved", str(error), "import the type at the top of its module"
        ) from error
    types: dict[str, tuple[Any, Any]] = {}
    for position, (key, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if position == 0 and key == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise refusal(where, "parameters that can be given by name", str(parameter), "write each one out")
        if key not in hints:
            raise refusal(where, f"a type hint on {key!r}", "none", f"write {key}: str, or what it is")
        types[key] = (hints[key], parameter.default)
    return types


def schema_of(annotation: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of one type: str, int, float, bool, list[...], dict, Literal, Optional and unions,
    dataclass, TypedDict.

    Raises:
        BadInput: any other type.
    """
    if annotation in _PLAIN:
        return {"type": _PLAIN[annotation]}
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is dict or origin in (dict, Mapping):
        value = arguments[1] if arguments else Any
        return (
            {"type": "object"} if value is Any else {"type": "object", "additionalProperties": schema_of(value, where)}
        )
    if annotation is list or origin is list:
        item = arguments[0] if arguments else Any
        return {"type": "array"} if item is Any else {"type": "array", "items": schema_of(item, where)}
    if origin is typing.Literal:
        kinds = {_PLAIN.get(type(a)) for a in arguments}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        options = [schema_of(a, where) for a in arguments if a is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation):
        return _record(annotation, where)
    raise refusal(
        where,
        "str, int, float, bool, list, dict, Literal, Optional, a dataclass or a TypedDict",
        str(annotation),
        "use one of these",
    )


def arguments_type(function: Callable[..., Any], where: str) -> type[msgspec.Struct]:
    """Return a struct type with the function's parameters as fields, for `msgspec.convert` to check the arguments of a
    call.

    Raises:
        BadInput: see `parameters`.
    """
    fields = [
        (key, annotation) if default is inspect.Parameter.empty else (key, annotation, msgspec.field(default=default))
        for key, (annotation, default) in parameters(function, where).items()
    ]
    return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)


def checked(arguments: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the arguments, converted to the function's types.

    Raises:
        ValueError: the arguments do not fit; the message is for the model: `code: expected a string, got 3`.
    """
    try:
        struct = msgspec.convert(dict(arguments), kind, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(_complaint(arguments, kind, error)) from error
    return {name: getattr(struct, name) for name in kind.__struct_fields__}


def env_args(args: dict[str, Any], kind: type[msgspec.Struct]) -> Any:
    """Return `[env.args]` as the environment's own struct.

    Raises:
        BadInput: a setting does not fit; the error names its path.
    """
    try:
        return msgspec.convert(args, kind, strict=True)
    except msgspec.ValidationError as error:
        names = ", ".join(kind.__struct_fields__) or "no settings"
        actual = _complaint(args, kind, error)
        raise refusal("env.args", f"settings of this world ({names})", actual, "correct them") from error


def _complaint(arguments: Mapping[str, Any], kind: type[msgspec.Struct], error: msgspec.ValidationError) -> str:
    """Return a message that names the argument that does not fit: `code: expected a string, got 3`."""
    try:
        convert(dict(arguments), kind)
    except InvalidValue as wrong:
        return wrong.text
    return str(error)


def _record(kind: Any, where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    if typing.is_typeddict(kind):
        required = [k for k in hints if k in kind.__required_keys__]
    else:
        missing = dataclasses.MISSING
        required = [f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing]
    properties = {key: schema_of(hint, f"{where}.{key}") for key, hint in hints.items()}
    return {"type": "object", "properties": properties, "required": required}


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _argument_notes(text: str) -> dict[str, str]:
    """Parse `Args:` of a Google-style docstring: name -> description, continuation lines joined."""
    block = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text + "\n", flags=re.MULTILINE)
    if not block:
        return {}
    lines = [line for line in block.group(1).splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    notes: dict[str, str] = {}
    last = ""
    for line in lines:
        entry = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line[indent:])
        if entry and len(line) - len(line.lstrip()) == indent:
            last = entry.group(1)
            notes[last] = entry.group(2).strip()
        elif last:
            notes[last] = f"{notes[last]} {line.strip()}".strip()
    return notes
