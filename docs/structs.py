"""Reads a recipe's structs for the pages: what a field holds, its default, and the docstring beside it.

Used by the writers of pages, which run it with `runpy`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import typing

import msgspec

Kind = type[msgspec.Struct]


def declared(kind: object) -> tuple[object, bool]:
    """Return a field's type without its annotations, and whether a class of the user's may stand there."""
    if typing.get_origin(kind) is not typing.Annotated:
        return kind, False
    kind, *beside = typing.get_args(kind)
    return kind, any("class_of" in (meta.extra or {}) for meta in beside)


def rules(kind: object) -> dict[str, Kind]:
    """Return the structs of a field that are chosen by name; none where that is not how they are chosen."""
    kind, _ = declared(kind)
    options = [o for o in (kind, *typing.get_args(kind)) if isinstance(o, type) and issubclass(o, msgspec.Struct)]
    tags = {str(o.__struct_config__.tag): o for o in options if o.__struct_config__.tag is not None}
    return {tag: o for tag, o in tags.items() if ":" not in tag}  # the base of a class that only a file can have


def kinds(kind: object) -> dict[str, Kind]:
    """Return the structs of a field that holds several by name, told apart by their kind."""
    return rules(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else {}


def struct(kind: object) -> Kind | None:
    """Return the struct that a field holds, by itself, optionally or by name."""
    options = [o for o in (kind, *typing.get_args(kind)) if isinstance(o, type)]
    return next((o for o in options if issubclass(o, msgspec.Struct) or dataclasses.is_dataclass(o)), None)


def fields(kind: type) -> list[msgspec.structs.FieldInfo]:
    """Return the fields of a struct or a dataclass: name, type and default."""
    if not dataclasses.is_dataclass(kind):
        return list(msgspec.structs.fields(kind))
    types = typing.get_type_hints(kind)
    return [msgspec.structs.FieldInfo(f.name, f.name, types[f.name], f.default) for f in dataclasses.fields(kind)]


def summary(kind: Kind) -> str:
    """Return the first paragraph of a struct's docstring, on one line."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field that the class itself declares, each on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        literal = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and literal:
            docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


def type_of(kind: object) -> str:
    """Return a type as the author of a TOML file thinks of it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return type_of(args[0])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in args)
    if origin in (tuple, list):
        return f"list of {type_of(args[0])}"
    if struct(kind) or origin is dict or kind is dict:
        return "table"
    if args:
        return " or ".join(type_of(a) for a in args if a is not type(None))
    return {int: "integer", float: "number", str: "text", bool: "true, false"}.get(kind, "value")


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """Return a field's default as a cell of a table."""
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "–" if value is None else f"`{json.dumps(msgspec.to_builtins(value))}`"
