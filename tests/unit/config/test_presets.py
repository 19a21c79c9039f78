"""Algorithms by name: what a preset fills in, and that what stands beside it wins."""

from typing import Any

import pytest

from sparring.algo.config import AlgoConfig
from sparring.algo.credit.gae import Gae
from sparring.algo.gate.clip import Clip
from sparring.config import from_data
from sparring.errors import BadInput

BASE = {"run": {"name": "x"}, "models": {"policy": {"path": "/x"}}, "env": {"name": "reasoning_gym"}}


def algo(**given: Any) -> AlgoConfig:
    return from_data({**BASE, "algo": given}, "r").algo


def test_ppo_has_one_lambda_and_vapo_two_that_know_the_length() -> None:
    ppo, vapo = algo(preset="ppo"), algo(preset="vapo")
    assert ppo.credit == Gae(lambda_policy=0.95, lambda_value=0.95) and ppo.gate == Clip(low=0.2, high=0.2)
    assert vapo.credit == Gae(lambda_value=1.0, length_alpha=0.05) and vapo.gate == Clip(low=0.2, high=0.28)
    assert ppo.aggregation == vapo.aggregation == "token_mean"
    assert not ppo.filters_flat_groups, "a critic tells equal rollouts apart"


def test_what_is_given_beside_a_preset_stays() -> None:
    assert algo(preset="vapo", credit={"length_alpha": 0.1}).credit == Gae(lambda_value=1.0, length_alpha=0.1)
    assert algo(preset="ppo", gate="cispo").gate.__struct_config__.tag == "cispo"


def test_a_correction_by_name_replaces_that_of_a_preset_and_a_table_changes_it() -> None:
    assert algo(preset="decoupled_ppo", correction="none").correction_rule.does_nothing
    assert algo(preset="decoupled_ppo", correction={"high": 3.0}).correction_rule.in_words() == "token weights of at most 3"


def test_a_price_in_the_reward_tells_equal_rewards_apart() -> None:
    assert algo(credit="grpo").filters_flat_groups and not algo(credit="grpo", kl_reward={}).filters_flat_groups


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"credit": {"name": "gdpo", "weights": {"a": 1.0}}, "kl_reward": {}}, "a credit that counts rewards of tokens, got 'gdpo'"),
        ({"credit": "process", "kl_reward": {}}, "a credit that counts rewards of tokens, got 'process'"),
        ({"credit": "maxrl", "shaping": [{"name": "overlong"}]}, "rewards of at least 0 for 'maxrl'"),
        ({"credit": {"name": "gdpo", "weights": {"a": 1.0}}, "shaping": [{"name": "overlong"}]}, "give overlong a weight in algo.credit.weights"),
    ],
)
def test_what_changes_rewards_changes_what_the_credit_reads(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        algo(**given).check(8, {"reference"})
