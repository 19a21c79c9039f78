"""docs/from-trl.md and docs/from-verl.md: every key of ours that a table names is one of a recipe."""

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

DOCS = Path(__file__).resolve().parents[3] / "docs"
SECTIONS = {field.encode_name for field in msgspec.structs.fields(RunConfig)}


def keys(text: str) -> list[str]:
    """Return our keys in the second column of every row, and those named in the third."""
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
    kinds: list[object] = [{f.encode_name: f.type for f in msgspec.structs.fields(RunConfig)}[section]]
    if section == "models":
        path = path[1:]
    for name in path:
        fields = [
            typing.get_type_hints(s, include_extras=True) for kind in kinds for s in structs(kind) if s is not None
        ]
        kinds = [types_of[name] for types_of in fields if name in types_of]
        if not kinds:
            return True
    return False


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md"])
def test_every_key_of_ours_is_one(page: str) -> None:
    named = keys((DOCS / page).read_text(encoding="utf-8"))
    assert len(named) > 40 and [key for key in named if unknown(key)] == []


def test_a_key_that_is_none_is_found() -> None:
    row = "| `num_generations` | `rollout.group_size`, `rollout.groups` | and `models.policy.lora.rang`, `a.b` |"
    assert [key for key in keys(row) if unknown(key)] == ["rollout.groups", "models.policy.lora.rang"]
    assert not any(map(unknown, ("algo.gate.bound", "models.policy.lora.rank", "env.rubric", "algo.credit.normalise")))
    assert unknown("algo.gate.none_such") and unknown("env.args2")
