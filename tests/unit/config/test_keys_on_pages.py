"""Every setting that a page names as `[section] key`, and every key of ours in the tables of docs/from-trl.md and
docs/from-verl.md, is one of a recipe. Whole pieces of recipes are loaded by tests/unit/test_code_on_pages.py."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sparring.recipe.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("design/*.md")]
SECTIONS = {field.encode_name for field in msgspec.structs.fields(RunConfig)}


def settings(text: str) -> list[str]:
    """Return the keys that a text names as `[section] key` or `[section.table] key`."""
    return [f"{section}.{key}" for section, key in re.findall(r"`\[([\w.]+)\] (\w+)", text)]


def keys(text: str) -> list[str]:
    """Return our keys in the second column of every row of a table, and those named in the third."""
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| `")]
    named = [key for row in rows for key in re.findall(r"`(\w+\.[\w.]+)`", "".join(row))]
    assert all(row[0].strip() == "none" or "`" in row[0] for row in rows)
    return [key for key in named if key.split(".")[0] in SECTIONS]


def structs(kind: object) -> Iterator[type | None]:
    """Yield the structs that a value of this type may be, those in unions and tables included; None for free tables."""
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
        yield kind
    elif typing.get_origin(kind) is dict or kind is dict:
        values = typing.get_args(kind)
        yield from structs(values[1]) if values and values[1] is not typing.Any else (None,)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType, typing.Annotated):
        for option in typing.get_args(kind):
            yield from structs(option)


def unknown(key: str) -> bool:
    """Return whether no recipe has this dotted key."""
    section, *path = key.split(".")
    kinds: list[object] = [{f.encode_name: f.type for f in msgspec.structs.fields(RunConfig)}.get(section)]
    if section in ("models", "envs"):
        path = path[1:]
    for name in path:
        options = [struct for kind in kinds for struct in structs(kind)]
        if None in options:
            return False
        fields = [typing.get_type_hints(struct, include_extras=True) for struct in options]
        kinds = [types_of[name] for types_of in fields if name in types_of]
        if not kinds:
            return True
    return False


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_every_key_that_a_page_names_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [key for key in settings(text) if unknown(key)] == []
    if page in ("docs/from-trl.md", "docs/from-verl.md"):
        assert len(keys(text)) > 40 and [key for key in keys(text) if unknown(key)] == []


def test_a_key_that_is_none_is_found() -> None:
    text = "`[rl] correction`, `[algo] correction = 1`, `[nowhere] key`, `[engine.kv] bytes`, `[engine.kv] kv_bytes`"
    assert [key for key in settings(text) if unknown(key)] == ["rl.correction", "nowhere.key", "engine.kv.kv_bytes"]
    row = "| `num_generations` | `rollout.group_size`, `rollout.groups` | and `models.policy.lora.rang`, `a.b` |"
    assert [key for key in keys(row) if unknown(key)] == ["rollout.groups", "models.policy.lora.rang"]
    assert not any(map(unknown, ("algo.gate.bound", "models.policy.lora.rank", "env.rubric", "algo.credit.normalise")))
    assert unknown("algo.gate.none_such") and unknown("env.args2")
