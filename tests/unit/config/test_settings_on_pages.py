"""Every setting that a page names as `[section] key` is one of a recipe. Whole pieces of recipes are loaded by
tests/unit/test_code_on_pages.py."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from sparring.recipe.run_config import RunConfig

ROOT = Path(__file__).parents[3]


def unknown_keys(text: str) -> list[str]:
    """What `[section] key` in a text names no setting."""
    sections = {field.name: field.type for field in msgspec.structs.fields(RunConfig)}
    found = []
    for section, key in re.findall(r"`\[(\w+)\] (\w+)", text):
        options = (kind, *typing.get_args(kind)) if (kind := sections.get(section)) is not None else ()
        structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
        if key not in {field.name for struct in structs for field in msgspec.structs.fields(struct)}:
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
