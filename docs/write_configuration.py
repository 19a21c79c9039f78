"""Writes docs/configuration.md: every key of a recipe, from the docstrings beside the fields. Run it after changing one.

    python docs/write_configuration.py
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparring.config import RunConfig

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

A recipe is one TOML file. It names what differs from the defaults below; `sparring run` writes the complete, resolved
config to `runs/<name>/config.toml`, which is a recipe itself and runs as it is.

    sparring run recipes/quickstart.toml --set rl.steps=10 --set env.args.datasets.0.weight=2 --name short

`--set a.b=value` replaces one key. The value is TOML; what is not TOML is text. A number in the path counts in a list.
In Python the same config is a struct: `from sparring.config import load, RunConfig`, then
`from sparring.launch.run import run_recipe; run_recipe(config)`.

An unknown key, a wrong type or a contradiction is refused before anything starts, with exit status 2:

    recipes/first.toml: rollout.group_sizee: expected one of ..., got an unknown key; do you mean rollout.group_size?

*This page is written by `docs/write_configuration.py` from the docstrings beside the fields.*
"""


def page() -> str:
    """The whole page."""
    sections = [HEAD]
    for field in msgspec.structs.fields(RunConfig):
        (kind,) = _structs(field.type)
        name = f"{field.name}.<name>" if typing.get_origin(field.type) is dict else field.name
        sections += _section(kind, name, _field_docs(RunConfig)[field.name])
    return "\n".join(sections)


def _section(kind: type[msgspec.Struct], name: str, lead: str = "") -> Iterator[str]:
    docs = _field_docs(kind)
    summary = lead or textwrap.dedent(inspect.getdoc(kind) or "")
    tag = msgspec.inspect.type_info(kind)
    which = f" with `{tag.tag_field} = {json.dumps(tag.tag)}`" if tag.tag_field else ""
    yield f"## `[{name}]`{which}\n\n{summary}\n\n| key | type | default | |\n| --- | --- | --- | --- |"
    inner = []
    for field in msgspec.structs.fields(kind):
        below = _structs(field.type)
        if below:
            # of several kinds each also says itself what it is
            itself = ["" if len(below) == 1 else f" {inspect.cleandoc(kind.__doc__ or '')}" for kind in below]
            inner += [(kind, f"{name}.{field.name}", docs[field.name] + own) for kind, own in zip(below, itself, strict=True)]
            continue
        yield f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {_cell(docs[field.name])} |"
    yield ""
    for below, path, doc in inner:
        yield from _section(below, path, doc)


def _structs(kind: object) -> list[type[msgspec.Struct]]:
    """The structs that a field may hold, by itself, optionally or by name."""
    options = [kind, *typing.get_args(kind)]
    return [o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)]


def _field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The literal under each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        literal = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and literal:
            docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


def _type(kind: object) -> str:
    """A type as a TOML author thinks of it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in args)
    if origin in (tuple, list):
        return f"list of {_type(args[0])}"
    if origin is dict or kind is dict:
        return "table"
    if args:
        return " or ".join(_type(a) for a in args if a is not type(None))
    return {int: "integer", float: "number", str: "text", bool: "true, false"}.get(kind, "value")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "–" if value is None else f"`{json.dumps(msgspec.to_builtins(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
