"""Algorithms by name: what a preset fills in, and that what stands beside it wins."""

from typing import Any

import pytest

from sparring.algo.config import AlgoConfig
from sparring.algo.credit.gae import Gae
from sparring.algo.gate.clip import Clip
from sparring.algo.gate.dual_clip import DualClip
from sparring.errors import BadInput
from sparring.recipe.load import from_data

BASE = {"run": {"name": "x"}, "models": {"policy": {"path": "/x"}}, "env": {"name": "reasoning_gym"}}


def algo(**given: Any) -> AlgoConfig:
    return from_data({**BASE, "algo": given}, "r").algo


def test_ppo_has_one_lambda_and_vapo_two_that_know_the_length() -> None:
    ppo, vapo = algo(preset="ppo"), algo(preset="vapo")
    assert ppo.credit == Gae(lambda_policy=0.95, lambda_value=0.95) and ppo.gate == Clip(low=0.2, high=0.2)
    assert vapo.credit == Gae(lambda_value=1.0, length_alpha=0.05) and vapo.gate == Clip(low=0.2, high=0.28)
    assert ppo.aggregation == vapo.aggregation == "token_mean"


def test_settings_beside_a_preset_stay() -> None:
    assert algo(preset="vapo", credit={"length_alpha": 0.1}).credit == Gae(lambda_value=1.0, length_alpha=0.1)
    assert algo(preset="ppo", gate="cispo").gate.__struct_config__.tag == "cispo"


def test_a_correction_by_name_replaces_that_of_a_preset_and_a_table_changes_it() -> None:
    assert algo(preset="decoupled_ppo", correction="none").correction_rule.does_nothing
    changed = algo(preset="decoupled_ppo", correction={"high": 3.0}).correction_rule
    assert changed.in_words() == "token weights masked outside 0 to 3"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"preset": "gspo", "gate": {"cap": 5}},
            "algo.gate.cap: expected a key",
        ),
        (
            {"preset": "cispo", "gate": {"bound": 5.0}},
            "algo.gate.bound: expected a key of the gate 'cispo' of preset 'cispo': high, low",
        ),
        (
            {"preset": "gpg", "credit": {"normalise": True}},
            "algo.credit.normalise: expected a key of the credit 'gpg'",
        ),
        (
            {"preset": "rloo", "gate": {"low": 0.1}},
            "algo.gate.low: expected no key",
        ),
        (
            {"preset": "grpo", "ratio": {"per_token": True}},
            "expected no key",
        ),
        (
            {"preset": "decoupled_ppo", "correction": {"cap": 5.0}},
            "algo.correction.cap: expected one of bound, compare, denominator, high",
        ),
        (
            {"preset": "grpo", "max_tokens": 9},
            'max_tokens must be 0 unless aggregation = "constant"',
        ),
        ({"preset": "gspoo", "gate": {"low": 0.1}}, "algo.preset: expected one of cispo"),
    ],
)
def test_a_key_that_the_parts_of_a_preset_do_not_have_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        algo(**given)


def test_a_key_of_another_rule_is_understood_where_that_rule_is_named() -> None:
    assert algo(preset="gspo", ratio="token", gate={"name": "dual_clip", "bound": 5.0}).gate == DualClip(bound=5.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"credit": {"name": "gdpo", "weights": {"a": 1.0}}, "kl_reward": {}},
            "algo.kl_reward: expected a credit that reads per-token rewards",
        ),
        ({"credit": "process", "kl_reward": {}}, "algo.kl_reward: expected a credit that reads per-token rewards"),
        ({"credit": "maxrl", "shaping": [{"name": "overlong"}]}, "rewards of at least 0 with 'maxrl'"),
        (
            {"shaping": [{"name": "overlong"}, {"name": "stop_properly"}]},
            "algo.shaping stop_properly: expected rewards of at least 0",
        ),
        (
            {"credit": {"name": "gdpo", "weights": {"a": 1.0}}, "shaping": [{"name": "overlong"}]},
            "give overlong a weight in algo.credit.weights",
        ),
    ],
)
def test_shaping_that_the_credit_cannot_read_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        algo(**given).check(8, {"reference"})
