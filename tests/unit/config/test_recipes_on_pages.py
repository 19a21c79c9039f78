"""The pieces of recipes on the pages are understood, each beside the least that a recipe needs."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparring.recipe.load import from_data
from sparring.recipe.run_config import RunConfig

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
BASE = {"run": {"name": "x"}, "models": {"policy": {"path": "/x"}}, "env": {"name": "reasoning_gym"}}
FENCED = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    \[\w+.*\]\n(?:(?:    .*)?\n)*", re.MULTILINE)


def pieces() -> list[Any]:
    found = []
    for page in ("preference.md", "rewards.md", "path/distill.md", "algorithms.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        blocks = [*FENCED.findall(text), *INDENTED.findall(FENCED.sub("", text))]
        found += [pytest.param(block, id=f"{page}-{number}") for number, block in enumerate(blocks)]
    return found


def read(block: str) -> RunConfig:
    given = tomllib.loads("\n".join(line.removeprefix("    ") for line in block.splitlines()))
    data = {**BASE, **given}
    data["models"] = {**BASE["models"], **given.get("models", {})}
    return from_data(data, "page")


@pytest.mark.parametrize("block", pieces())
def test_a_recipe_on_a_page_is_understood(block: str) -> None:
    assert read(block) != from_data(BASE, "page")


def test_every_page_has_some() -> None:
    ids = [str(piece.id) for piece in pieces()]
    assert len(ids) >= 6 and {name.rpartition("-")[0] for name in ids} == {
        "preference.md",
        "rewards.md",
        "path/distill.md",
        "algorithms.md",
    }


def unknown_keys(text: str) -> list[str]:
    """What `[section] key` in a text names no setting."""
    sections = {field.name: field.type for field in msgspec.structs.fields(RunConfig)}
    found = []
    for section, key in re.findall(r"`\[(\w+)\] (\w+)", text):
        kind = sections.get(section)
        names = msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
        if kind is None or key not in {field.name for field in names}:
            found.append(f"[{section}] {key}")
    return found


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("design/*.md")]


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_every_setting_that_a_page_names_is_one(page: str) -> None:
    assert unknown_keys((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_setting_of_another_section_is_found() -> None:
    assert unknown_keys("see `[rl] correction`, `[algo] correction = 1`, `[nowhere] key`") == [
        "[rl] correction",
        "[nowhere] key",
    ]
