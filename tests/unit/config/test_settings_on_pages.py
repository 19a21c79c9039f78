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
    """What `[section] key` or `[section.table] key` in a text names no setting. Tables by name or by kind are left out."""
    found = []
    for section, key in re.findall(r"`\[([\w.]+)\] (\w+)", text):
        fields = fields_of(RunConfig)
        for table in section.split("."):
            fields = fields_of(fields.get(table))
        if key not in fields and (fields or "." not in section):
            found.append(f"[{section}] {key}")
    return found


def fields_of(kind: object) -> dict[str, object]:
    """The fields of a struct, or of the structs of a union, with their types."""
    options = (kind, *typing.get_args(kind))  # of an optional one, too
    structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
    if any(struct.__struct_config__.tag is not None for struct in structs):
        return {}
    return {field.name: field.type for struct in structs for field in msgspec.structs.fields(struct)}


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("design/*.md")]


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_every_setting_that_a_page_names_is_one(page: str) -> None:
    assert unknown_keys((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_setting_of_another_section_is_found() -> None:
    text = (
        "see `[rl] correction`, `[algo] correction = 1`, `[nowhere] key`, `[engine.kv] bytes`, `[engine.kv] kv_bytes`"
    )
    assert unknown_keys(text) == ["[rl] correction", "[nowhere] key", "[engine.kv] kv_bytes"]
