"""Parts of the score that a credit rule reads by name: somebody reports them."""

from __future__ import annotations

from typing import Any

from refusals import refused_at

from sparring.recipe.load import from_data
from sparring.recipe.run_config import RunConfig
from sparring.stages.data.demonstrations import Conversation
from sparring.stages.preflight.parts import check_parts
from sparring.types import Score

RUBRIC = {
    "data": "rows.jsonl",
    "rubric": {"form": {"kind": "regex", "pattern": "a", "gate": 1.0}, "right": {"kind": "exact", "domains": ["x"]}},
}
WORLD = {"name": "world.py:W"}


def config(env: dict[str, Any], *weights: str, **algo: Any) -> RunConfig:
    document = {
        "run": {"name": "r", "stages": ["rl"]},
        "models": {"policy": {"path": "p"}},
        "env": env,
        "algo": {"credit": {"name": "gdpo", "weights": dict.fromkeys(weights, 1.0)}, **algo},
    }
    return from_data(document, "r.toml")


def played(*scores: Score | None) -> list[Conversation]:
    return [Conversation(name="c", messages=(), tools=(), score=score) for score in scores]


def test_gated_and_routed_parts_of_a_rubric_are_there() -> None:
    assert check_parts(config(RUBRIC, "form", "right"), played(Score(reward=0.0, parts={"form": 0.0}))) == []
    shaped = config(RUBRIC, "right", "overlong", shaping=[{"name": "overlong"}])
    assert check_parts(shaped, []) == []


def test_a_part_that_no_rubric_has_is_refused() -> None:
    with refused_at("algo.credit.weights", "parts"):
        check_parts(config(RUBRIC, "form", "rihgt"), [])


def test_a_world_without_parts_is_refused_and_one_with_others_is_told() -> None:
    with refused_at("algo.credit.weights", "an environment whose scores have parts"):
        check_parts(config(WORLD, "right"), played(Score(reward=0.0)))
    assert check_parts(config(WORLD, "right"), played(None)) != []  # nobody scored it: rewards from outside
    [said] = check_parts(config(WORLD, "short", "right"), played(Score(reward=0.0, parts={"short": 0.0})))
    assert "reported right;" in said


def test_other_credits_read_none() -> None:
    assert check_parts(config(WORLD, credit={"name": "grpo"}), played(Score(reward=0.0))) == []
