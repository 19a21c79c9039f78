"""Algorithms by name: what a preset fills in, and that what stands beside it wins."""

from typing import Any

from sparring.algo.config import AlgoConfig
from sparring.algo.credit.gae import Gae
from sparring.algo.gate.clip import Clip
from sparring.config import from_data

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
