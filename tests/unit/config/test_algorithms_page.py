"""docs/algorithms.md says what the code says, and of every name, default and preset where it is from."""

import runpy
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from sparring.algo.config import AlgoConfig
from sparring.algo.correction.presets import PRESETS as CORRECTIONS
from sparring.algo.facts import Facts, Preset
from sparring.algo.presets import PRESETS

DOCS = Path(__file__).resolve().parents[3] / "docs"
WRITER = runpy.run_path(str(DOCS / "write_algorithms.py"))
KINDS = [kind for _, _, kinds in WRITER["SECTIONS"] for kind in kinds]


def test_the_page_is_what_its_writer_writes() -> None:
    written = WRITER["page"]()
    assert (DOCS / "algorithms.md").read_text() == written, "run: python docs/write_algorithms.py"
    assert "### `rloo`\n\nRLOO: a rollout's reward less the mean of its siblings'." in written
    assert "| `lambda_policy` | number | `0.95` | TRL's PPO; " in written
    assert '### preset `gspo`\n\n`ratio = "sequence"`, ' in written and "*From*: arXiv 2507.18071, " in written


def test_every_row_of_a_table_has_the_cells_of_its_head() -> None:
    cells = 0
    for line in (DOCS / "algorithms.md").read_text().splitlines():
        found = line.count(" | ") + 1 if line.startswith("|") else 0
        assert found == cells or not found or not cells, line
        assert found or not line.endswith(" |"), f"half a row: {line}"
        cells = found


def missing(kind: type[msgspec.Struct], facts: Facts) -> list[str]:
    """What facts leave unsaid: the source, and the settings with a default whose default is from nowhere; or is said of
    nothing."""
    with_default = [f.name for f in msgspec.structs.fields(kind) if not f.required]
    unsaid = ["source"] if not facts.source.strip() else []
    return unsaid + [
        n for n in (*with_default, *facts.defaults) if n not in with_default or not facts.defaults.get(n, "").strip()
    ]


@pytest.mark.parametrize("kind", [*KINDS, AlgoConfig], ids=lambda kind: kind.__name__)
def test_every_rule_and_every_default_has_a_source(kind: type[msgspec.Struct]) -> None:
    facts = WRITER["facts"](kind)
    assert missing(kind, facts) == [] and all(one.strip().endswith(".") for one in facts.differences)


def test_a_default_without_a_source_is_found() -> None:
    class Rule(msgspec.Struct, kw_only=True):
        facts: ClassVar[Facts] = Facts(
            source=" ", defaults={"low": "a paper", "gone": "a paper", "wide": ""}, differences=()
        )

        given: int
        low: float = 0.1
        high: float = 0.2
        wide: bool = True

    assert missing(Rule, Rule.facts) == ["source", "high", "wide", "gone", "wide"]


@pytest.mark.parametrize(("name", "preset"), [*PRESETS.items(), *CORRECTIONS.items()], ids=str)
def test_every_preset_has_a_source(name: str, preset: Preset) -> None:
    assert preset.source.strip() and all(one.strip().endswith(".") for one in preset.differences), name


def test_a_preset_cannot_leave_its_source_out() -> None:
    given: dict[str, Any] = {"sets": {}, "differences": ()}
    with pytest.raises(TypeError, match="source"):
        Preset(**given)


def test_a_new_rule_comes_with_its_facts() -> None:
    """Every rule that a recipe can name stands on the page, so that the tests above ask it."""
    config = WRITER["CONFIGURATION"]
    named = [rule for field in msgspec.structs.fields(AlgoConfig) for rule in config["_rules"](field.type).values()]
    assert len(named) > 40 and set(named) <= set(KINDS)
