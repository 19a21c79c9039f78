"""Writes docs/configuration/: every key of a recipe, from the docstrings beside the fields, a page a section. Run it
after changing one.

python docs/write_configuration.py
"""

from __future__ import annotations

import runpy
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparring.recipe.run_config import RunConfig

DOCS = Path(__file__).parent
STRUCTS = runpy.run_path(str(DOCS / "structs.py"))
WRAP = runpy.run_path(str(DOCS / "wrap.py"))
ALGORITHMS = runpy.run_path(str(DOCS / "write_algorithms.py"))
FOLDER = DOCS / "configuration"

HEAD = """# Configuration

A recipe is one TOML file. It names what differs from the defaults; `sparring run` writes the complete, resolved config
to `runs/<name>/config.toml`, which is a recipe itself and runs as it is.

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

A section of the recipe has a page with all its keys. Settings of a rule that is chosen by name, such as
`[algo] credit`, stand with the rule among the [algorithms](../algorithms/index.md).

| section | |
| --- | --- |
"""

FOOT = "*These pages are written by `docs/write_configuration.py` from the docstrings beside the fields.*\n"
TABLE = "| key | type | default | |\n| --- | --- | --- | --- |"
OWN = '`"file.py:Class"`'
"""Name of a rule in a file of the user's."""


def pages() -> dict[str, str]:
    """Return every page's text by its file name, `index.md` first."""
    index, written = [], {}
    for field in msgspec.structs.fields(RunConfig):
        kind, lead = STRUCTS["struct"](field.type), STRUCTS["field_docs"](RunConfig)[field.name]
        name = f"{field.name}.<name>" if typing.get_origin(field.type) is dict else field.name
        file = f"{field.name}.md"
        written[file] = "\n".join(_section(kind, name, lead)).removeprefix("#")
        index.append(f"| [`[{name}]`]({file}) | {lead} |\n")
    written = {"index.md": f"{HEAD}{''.join(index)}\n{FOOT}", **written}
    return {file: WRAP["wrapped"](WRAP["fenced"](text)) for file, text in written.items()}


def _section(kind: type[msgspec.Struct], name: str, lead: str) -> Iterator[str]:
    yield f"## `[{name}]`\n\n{lead}{_inherited(kind)}\n"
    docs = STRUCTS["field_docs"](kind)
    fields = [f for f in STRUCTS["fields"](kind) if f.name in docs]  # a base's have a section of their own
    if not fields:
        return
    yield TABLE
    inner, by_kind = [], []
    for field in fields:
        doc, default, below = docs[field.name], STRUCTS["default_of"](field), STRUCTS["struct"](field.type)
        kinds, rules = STRUCTS["kinds"](field.type), STRUCTS["rules"](field.type)
        declared, own = STRUCTS["declared"](field.type)
        if own and len(rules) < 2 and (below := STRUCTS["struct"](declared)) is not None:
            yield _row(field.name, f"{OWN}, or a table", default, doc)
            inner += [] if field.default is None else [(below, field.name, doc)]  # None: a class of the user's alone
        elif len(rules) > 1 or rules and field.default is not None:
            default = "–" if field.default is None else f'`"{msgspec.to_builtins(field.default)["name"]}"`'
            yield _row(field.name, f"{_names(rules, own)}, or a table", default, doc)
        elif kinds:
            yield _row(field.name, "tables by name", default, doc)
            by_kind += _by_kind(kinds, f"{name}.{field.name}.<name>")
        elif below is not None:
            inner.append((below, field.name, doc))
        else:
            yield _row(field.name, STRUCTS["type_of"](field.type), default, doc)
    yield ""
    for below, key, doc in inner:
        yield from _section(below, f"{name}.{key}", doc)
    yield from by_kind


def _inherited(kind: type[msgspec.Struct]) -> str:
    """Return the sentence on the keys that a section shares with another one."""
    sections = {STRUCTS["struct"](field.type): field.name for field in msgspec.structs.fields(RunConfig)}
    shared = [sections[base] for base in kind.__mro__[1:] if base in sections]
    return "".join(f" It has every key of [`[{name}]`]({name}.md), and these:" for name in shared)


def _names(rules: dict[str, type[msgspec.Struct]], own: bool) -> str:
    """Return the names of rules, each with a link to its settings."""
    links = (f'[`"{tag}"`](../algorithms/{ALGORITHMS["PLACES"][rule]})' for tag, rule in rules.items())
    return ", ".join([*links, *([OWN] if own else [])])


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
        docs = STRUCTS["field_docs"](base)
        yield f"## `[{name}] {key} = {every}`\n\n{STRUCTS['summary'](base)}\n"
        if docs:
            yield TABLE
        for field in msgspec.structs.fields(base):
            if field.name in docs:
                yield _row(field.name, STRUCTS["type_of"](field.type), STRUCTS["default_of"](field), docs[field.name])
        yield ""


def _row(key: str, kind: str, default: str, doc: str) -> str:
    return f"| `{key}` | {kind} | {default} | {doc.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    WRAP["write"](FOLDER, pages())
