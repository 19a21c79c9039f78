"""Loss terms on hand-made log-probabilities."""

import math
from dataclasses import replace

import pytest
import torch

from sparring.algo.config import AlgoConfig
from sparring.algo.gate.clip import Clip
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.tensors import micro_batch
from sparring.types import Sample


def run(config, ratio, advantage):
    """Loss and its derivative by the log-probability of one token with this ratio and advantage."""
    behaviour = -1.0
    row = Sample(
        id="r",
        group="g",
        source="policy",
        tokens=(1, 2),
        weights={"policy": (0.0, 1.0)},
        logprobs=(0.0, behaviour),
        advantages=(0.0, advantage),
    )
    logprob = torch.tensor([behaviour + math.log(ratio)], requires_grad=True)
    quantities = {"logprob": logprob, "entropy": torch.tensor([0.5])}
    result = PolicyLoss(config)(quantities, micro_batch([row], {"policy": 1.0}))
    result.loss.backward()
    return result.loss.item(), logprob.grad.item(), result.metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "derivative", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.25, 2.0, -2.5, -2.5, 0),  # inside the higher upper bound
        (1.5, 2.0, -1.28 * 2.0, 0.0, 1),
        (0.5, 2.0, -1.0, -1.0, 0),  # a good token that became rare is pushed without bound
        (0.5, -2.0, 0.8 * 2.0, 0.0, 1),
        (1.5, -2.0, 3.0, 3.0, 0),
    ],
)
def test_clip_higher(ratio, advantage, value, derivative, clipped):
    loss, slope, metrics = run(AlgoConfig(gate=Clip(low=0.2, high=0.28)), ratio, advantage)
    assert loss == pytest.approx(value, rel=1e-5)
    assert slope == pytest.approx(derivative, rel=1e-5)
    assert metrics["clip_fraction"] == (clipped, 1)
    assert metrics["ratio"][0] == pytest.approx(ratio, rel=1e-5)
    assert metrics["approx_kl"][0] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)
    assert metrics["entropy"] == (0.5, 1)


def test_a_broken_log_probability_stays_finite():
    loss, slope, _ = run(AlgoConfig(), math.exp(100), -1.0)
    assert math.isfinite(loss) and slope == 0.0


def test_imitation_is_the_weighted_mean_of_negative_log_likelihood():
    row = Sample(id="r", group="g", source="expert", tokens=(1, 2, 3), weights={"imitate": (0.0, 1.0, 3.0)})
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = ImitateLoss()({"logprob": logprob}, micro_batch([row], {"imitate": 4.0}))
    result.loss.backward()
    assert result.loss.item() == 7.0 / 4.0
    assert logprob.grad.tolist() == [-0.25, -0.75]


def test_tokens_of_another_term_between_two_turns_do_not_join_them():
    """ECHO gives a tool's answer weight in the imitate term; a turn stays what the policy sampled at once."""
    policy, imitate = (0.0, 1.0, 1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0, 1.0, 0.0)
    row = Sample(
        id="r#0",
        group="g",
        source="policy",
        tokens=(1, 2, 3, 4, 5, 6),
        weights={"policy": policy, "imitate": imitate},
        logprobs=(0.0, -1.0, -1.0, 0.0, 0.0, -1.0),
        advantages=(0.0, 1.0, 1.0, 0.0, 0.0, 1.0),
    )
    both = micro_batch([row], {"policy": 3.0, "imitate": 2.0})
    alone = micro_batch([replace(row, weights={"policy": policy})], {"policy": 3.0})
    assert alone.turns.tolist() == [0, 0, 1]
    assert both.turns[both.weights["policy"] != 0].tolist() == [0, 0, 1]
