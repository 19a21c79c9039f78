"""Writes docs/configuration.md: every key of a recipe, from the docstrings beside the fields. Run it after changing
one.

python docs/write_configuration.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import runpy
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparring.recipe.run_config import RunConfig

PAGE = Path(__file__).with_name("configuration.md")
WRAP = runpy.run_path(str(PAGE.with_name("wrap.py")))

HEAD = """# Configuration

A recipe is one TOML file. It names what differs from the defaults below; `sparring run` writes the complete, resolved
config to `runs/<name>/config.toml`, which is a recipe itself and runs as it is.

```sh
sparring run recipes/quickstart.toml --set rl.steps=10 --set env.args.datasets.0.weight=2 --name short
```

`--set a.b=value` replaces one key. The value is TOML; what is not TOML is text. A number in the path counts in a list.
In Python the same config is a struct:

```python
from sparring import load_recipe

config = load_recipe("recipes/quickstart.toml", {"rl.steps": 10, "run.name": "short"})
```

`sparring.run(config)` runs it.

An unknown key, a wrong type or a contradiction is refused before anything starts, with exit status 2:

    recipes/first.toml: rollout.group_sizee: expected one of ..., got an unknown key; do you mean rollout.group_size?

*This page is written by `docs/write_configuration.py` from the docstrings beside the fields.*
"""


OWN = '`"file.py:Class"`'
"""Name of a rule in a file of the user's."""


def _declared(kind: object) -> tuple[object, bool]:
    """The type of a field without what is said beside it, and whether a rule of the user's may stand there."""
    if typing.get_origin(kind) is not typing.Annotated:
        return kind, False
    kind, *beside = typing.get_args(kind)
    return kind, any("class_of" in (meta.extra or {}) for meta in beside)


def page() -> str:
    """The whole page."""
    sections = [HEAD]
    for field in msgspec.structs.fields(RunConfig):
        kind = _struct(field.type)
        assert kind is not None
        name = f"{field.name}.<name>" if typing.get_origin(field.type) is dict else field.name
        sections += _section(kind, name, _field_docs(RunConfig)[field.name])
    return WRAP["wrapped"](WRAP["fenced"]("\n".join(sections)))


def _section(kind: type[msgspec.Struct], name: str, lead: str = "") -> Iterator[str]:
    docs = _field_docs(kind)
    summary = lead or textwrap.dedent(inspect.getdoc(kind) or "")
    yield f"## `[{name}{'' if ']' in name else ']'}`\n\n{summary}\n"
    fields = list(_fields(kind))
    if not fields:
        return
    yield "| key | type | default | |\n| --- | --- | --- | --- |"
    inner, by_kind = [], []
    for field in fields:
        if field.name not in docs:  # a base's, which has a section of its own
            continue
        declared, own = _declared(field.type)
        rules = _rules(field.type)
        if own and len(rules) < 2 and (below := _struct(declared)) is not None:
            below = None if field.default is None else below  # a class of the user's alone
            words = f"{OWN}, or a table"
            yield f"| `{field.name}` | {words} | {_default(field)} | {_cell(docs[field.name])} |"
            inner += [] if below is None else [(below, f"{name}.{field.name}", docs[field.name])]
            continue
        if len(rules) > 1 or rules and field.default is not None:
            names = ", ".join([*(f'`"{name}"`' for name in rules), *([OWN] if own else [])])
            default = "–" if field.default is None else f'`"{msgspec.to_builtins(field.default)["name"]}"`'
            yield f"| `{field.name}` | {names}, or a table | {default} | {_cell(docs[field.name])} |"
            inner += [(rule, f'{name}.{field.name}] name = "{tag}"', _summary(rule)) for tag, rule in rules.items()]
            continue
        kinds = _kinds(field.type)
        if kinds:
            yield f"| `{field.name}` | tables by name | {_default(field)} | {_cell(docs[field.name])} |"
            by_kind += _by_kind(kinds, f"{name}.{field.name}.<name>")
            continue
        below = _struct(field.type)
        if below is not None:
            inner.append((below, f"{name}.{field.name}", docs[field.name]))
            continue
        yield f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {_cell(docs[field.name])} |"
    yield ""
    for below, path, doc in inner:
        yield from _section(below, path, doc)
    yield from by_kind


def _by_kind(kinds: dict[str, type[msgspec.Struct]], name: str) -> Iterator[str]:
    """A table for each class that kinds are made of, with the keys that it adds, in the order in which they come up."""
    key = next(iter(kinds.values())).__struct_config__.tag_field
    shared: dict[type[msgspec.Struct], list[str]] = {}
    for tag, kind in kinds.items():
        for base in reversed(kind.__mro__):
            if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
                shared.setdefault(base, []).append(tag)
    for base, tags in shared.items():
        every = "every" if len(tags) == len(kinds) else ", ".join(f'"{tag}"' for tag in tags)
        docs = _field_docs(base)
        yield f"## `[{name}] {key} = {every}`\n\n{_summary(base)}\n"
        if docs:
            yield "| key | type | default | |\n| --- | --- | --- | --- |"
        for field in msgspec.structs.fields(base):
            if field.name in docs:
                yield f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {_cell(docs[field.name])} |"
        yield ""


def _kinds(kind: object) -> dict[str, type[msgspec.Struct]]:
    """The structs of a field that holds several by name, told apart by their kind."""
    return _rules(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else {}


def _rules(kind: object) -> dict[str, type[msgspec.Struct]]:
    """The structs of a field that are chosen by name; none where that is not how they are chosen."""
    kind, _ = _declared(kind)
    options = [o for o in (kind, *typing.get_args(kind)) if isinstance(o, type) and issubclass(o, msgspec.Struct)]
    tags = {str(o.__struct_config__.tag): o for o in options if o.__struct_config__.tag is not None}
    return {tag: o for tag, o in tags.items() if ":" not in tag}  # the base of a class that only a file can have


def _summary(kind: type[msgspec.Struct]) -> str:
    """The first paragraph of a struct's docstring, on one line."""
    return " ".join(textwrap.dedent(inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _struct(kind: object) -> type[msgspec.Struct] | None:
    """The struct that a field holds, by itself, optionally or by name."""
    options = (o for o in (kind, *typing.get_args(kind)) if isinstance(o, type))
    return next((o for o in options if issubclass(o, msgspec.Struct) or dataclasses.is_dataclass(o)), None)


def _fields(kind: type) -> Iterator[typing.Any]:
    """The fields of a struct or a dataclass: name, type and default."""
    if not dataclasses.is_dataclass(kind):
        yield from msgspec.structs.fields(kind)
        return
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield msgspec.structs.FieldInfo(field.name, field.name, types[field.name], field.default)


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
    if origin is typing.Annotated:
        return _type(args[0])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in args)
    if origin in (tuple, list):
        return f"list of {_type(args[0])}"
    if _struct(kind):
        return "table"
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
