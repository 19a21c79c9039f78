"""docs/configuration/ says what the code says, and every field says what it is."""

import runpy
from pathlib import Path

import msgspec

from sparring.recipe.run_config import RunConfig

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = runpy.run_path(str(DOCS / "write_configuration.py"))["pages"]()


def test_the_pages_are_what_their_writer_writes() -> None:
    committed = {page.name: page.read_text() for page in (DOCS / "configuration").glob("*.md")}
    assert committed == PAGES, "run: python docs/write_configuration.py"
    assert "| `group_size` | integer | `8` | " in PAGES["rollout.md"]


def test_every_section_has_a_page_that_the_index_names() -> None:
    sections = {field.name for field in msgspec.structs.fields(RunConfig)}
    assert {f"{name}.md" for name in sections} | {"index.md"} == set(PAGES)
    assert all(f"]({name}.md) | " in PAGES["index.md"] for name in sections)


def test_every_key_of_a_section_stands_on_its_page() -> None:
    structs = runpy.run_path(str(DOCS / "structs.py"))
    for section in msgspec.structs.fields(RunConfig):
        page = PAGES["env.md"] + PAGES["envs.md"] if section.name == "envs" else PAGES[f"{section.name}.md"]
        for field in msgspec.structs.fields(structs["struct"](section.type)):
            row, table = f"| `{field.name}` |", f".{field.name}]`\n"
            assert row in page or table in page, f"{section.name}.{field.name}"
