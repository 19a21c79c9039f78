"""docs/algorithms/ says what the code says, and of every name, default and preset where it is from."""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparring.algo.config import AlgoConfig
from sparring.algo.correction.presets import CORRECTIONS
from sparring.algo.presets import ALGORITHMS

DOCS = Path(__file__).resolve().parents[3] / "docs"
WRITER = runpy.run_path(str(DOCS / "write_algorithms.py"))
KINDS = [kind for _, parts in WRITER["PAGES"].values() for part in parts for kind in part.kinds]
PAGES = WRITER["pages"]()


def test_the_pages_are_what_their_writer_writes() -> None:
    committed = {page.name: page.read_text() for page in (DOCS / "algorithms").glob("*.md")}
    assert committed == PAGES, "run: python docs/write_algorithms.py"
    assert "## `rloo`\n\nRLOO: a rollout's reward less the mean of its siblings'." in PAGES["credit.md"]
    assert "| `lambda_policy` | number | `0.95` | TRL's PPO; " in PAGES["credit.md"]
    assert '## `gspo`\n\n`ratio = "sequence"`, ' in PAGES["presets-loss.md"]
    assert "*From*: arXiv 2507.18071, " in PAGES["presets-loss.md"]


def test_every_name_has_a_place_that_the_index_leads_to() -> None:
    assert len(KINDS) == len(set(KINDS)) == len(WRITER["PLACES"])
    presets = {
        name: page for page in ("presets-loss.md", "presets-credit.md") for name in WRITER["PAGES"][page][1][0].names
    }
    assert presets.keys() == ALGORITHMS.keys()
    for place in [*WRITER["PLACES"].values(), *(f"{page}#{name}" for name, page in presets.items())]:
        page, _, name = place.partition("#")
        assert f"({place})" in PAGES["index.md"] and f"# `{name}`\n" in PAGES[page]


def test_every_row_of_a_table_has_the_cells_of_its_head() -> None:
    cells = 0
    for line in "\n".join(PAGES.values()).splitlines():
        found = line.count(" | ") + 1 if line.startswith("|") else 0
        assert found == cells or not found or not cells, line
        assert found or not line.endswith(" |"), f"half a row: {line}"
        cells = found


def missing(kind: type[msgspec.Struct], entry: Mapping[str, Any]) -> list[str]:
    """What an entry leaves unsaid: the source, and the settings with a default whose default is from nowhere; or is said
    of nothing."""
    with_default = [f.name for f in msgspec.structs.fields(kind) if not f.required]
    unsaid, defaults = ["source"] if not entry["source"].strip() else [], entry.get("defaults", {})
    return unsaid + [n for n in (*with_default, *defaults) if n not in with_default or not defaults.get(n, "").strip()]


def are_sentences(entry: Mapping[str, Any]) -> bool:
    return all(one.strip().endswith(".") for one in entry.get("differences", ()))


@pytest.mark.parametrize("kind", [*KINDS, AlgoConfig], ids=lambda kind: kind.__name__)
def test_every_rule_and_every_default_has_a_source(kind: type[msgspec.Struct]) -> None:
    entry = WRITER["source_of"](kind)
    assert missing(kind, entry) == [] and are_sentences(entry)


def test_a_default_without_a_source_is_found() -> None:
    class Rule(msgspec.Struct, kw_only=True):
        given: int
        low: float = 0.1
        high: float = 0.2
        wide: bool = True

    entry = {"source": " ", "defaults": {"low": "a paper", "gone": "a paper", "wide": ""}}
    assert missing(Rule, entry) == ["source", "high", "wide", "gone", "wide"]


@pytest.mark.parametrize(("part", "presets"), [("presets", ALGORITHMS), ("corrections", CORRECTIONS)])
def test_every_preset_has_a_source(part: str, presets: Mapping[str, Any]) -> None:
    entries = WRITER["SOURCES"][part]
    assert entries.keys() == presets.keys()
    assert all(entry["source"].strip() and are_sentences(entry) for entry in entries.values())


def test_no_source_is_of_a_rule_that_is_gone() -> None:
    assert WRITER["SOURCES"]["rules"].keys() == {kind.__name__ for kind in (*KINDS, AlgoConfig)}


def test_a_new_rule_comes_with_its_sources() -> None:
    """Every rule that a recipe can name stands on the page, so that the tests above ask it."""
    rules = WRITER["STRUCTS"]["rules"]
    named = [rule for field in msgspec.structs.fields(AlgoConfig) for rule in rules(field.type).values()]
    assert len(named) > 40 and set(named) <= set(KINDS)
