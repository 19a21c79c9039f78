"""Tables that are told apart by one of their keys, such as the parts of a rubric or losses: what is refused, and in
which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.algo.rare.preference.ipo import Ipo
from sparring.envs.rubrics.config import Number
from sparring.errors import BadInput
from sparring.recipe.load import from_data, load
from sparring.recipe.run_config import dump

RECIPE = {
    "run": {"name": "first"},
    "models": {"policy": {"path": "a"}},
    "env": {"data": "rows.jsonl", "rubric": {"right": {"kind": "number", "tolerance": 0.5}, "word": {"kind": "exact"}}},
}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.rubric.right.kind=wishful", 'env.rubric.right.kind: expected one of "exact", "fuzzy", "number",'),
        ("env.rubric.right={weight=1}", 'env.rubric.right.kind: expected one of "exact", "fuzzy", "number",'),
        (
            "env.rubric.right.tolerence=1",
            "env.rubric.right.tolerence: expected one of cap, column, column_find, decides, domains,",
        ),
        ("env.rubric.right.tolerence=1", "do you mean env.rubric.right.tolerance?"),
        ("env.rubric.word.tolerance=1", "env.rubric.word.tolerance: expected one of cap, case, column,"),
        ("env.rubric.right.tolerance=much", "env.rubric.right.tolerance: expected a number"),
        (
            "env.rubric.right.tolerance=inf",
            "env.rubric.right.tolerance: expected a finite number",
        ),
        ('env.rubric.more={kind="judge", model="m"}', "env.rubric.more.prompt: expected a string"),
        ("env.rubric.right=1", "env.rubric.right: expected a table"),
        ("preference.loss={name='zpo'}", 'preference.loss.name: expected one of "dpo", "robust_dpo", "ipo"'),
        ("preference.loss=zpo", 'preference.loss.name: expected one of "dpo", "robust_dpo", "ipo"'),
        ("preference.loss={name='simpo', gama=1.0}", "preference.loss.gama: expected one of beta"),
        ("preference.loss={name='simpo', gamma='a'}", "preference.loss.gamma: expected a number"),
        ("preference.loss={name='kto', gamma=1.0}", "preference.loss.gamma: expected one of beta"),
    ],
)
def test_what_is_said_is_about_the_kind_at_hand(override: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        from_data(RECIPE, "first.toml", [override])
    assert said in str(refused.value) and str(refused.value).startswith(f"--set {override}: ")


def test_every_kind_survives_the_dump(tmp_path: Path) -> None:
    asked = {"model": "m", "prompt": "{completion}{first}{second}{answers}"}
    kinds = {
        "exact": {"case": True},
        "fuzzy": {"at_least": 0.5},
        "math": {"find": "\\\\boxed{(.*)}"},
        "regex": {"pattern": "a\nb\t\"'"},
        "json": {"schema": {"type": "object"}, "column": "a", "fields": ["b.c"]},
        "code": {"partial": True},
        "function": {"function": "f.py:f"},
        "judge": {**asked, "range": [0, 1.5], "gate": 0.5},
        "pairwise": {**asked, "choices": {"A": 1.0, "B": 0.0}},
        "ranking": asked,
    }
    rubric = {f"my {kind}": {"kind": kind, **settings} for kind, settings in kinds.items()}
    sections = {"env": {"data": "rows.jsonl", "rubric": rubric}, "preference": {"loss": {"name": "ipo", "beta": 0.2}}}
    config = from_data({**RECIPE, **sections}, "first.toml")
    assert config.preference.loss == Ipo(beta=0.2)
    (tmp_path / "dumped.toml").write_text(dump(config))
    assert load(tmp_path / "dumped.toml") == config
    assert from_data(RECIPE, "first.toml").env.rubric["right"] == Number(tolerance=0.5)


@pytest.mark.parametrize(("short", "table"), [("kto", {"name": "kto"}), ({"beta": 0.2}, {"name": "dpo", "beta": 0.2})])
def test_a_name_alone_is_a_table_and_a_table_without_one_is_the_defaults(short: object, table: object) -> None:
    one, other = (from_data({**RECIPE, "preference": {"loss": loss}}, "r") for loss in (short, table))
    assert one == other
