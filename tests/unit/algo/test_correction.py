"""Corrections for an engine whose probabilities are not the trainer's, on hand-made log-probabilities."""

import math

import pytest
import torch

from sparring.algo.config import GrpoConfig
from sparring.algo.correction.load import load_correction
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.tensors import micro_batch
from sparring.types import Sample

ADVANTAGES = (1.0, -2.0, 0.5, -1.0)


def loss_of(correction, old, behaviour, dtype=torch.float32):
    """The policy loss over four tokens, its gradient by their log-probabilities, and the metrics."""
    row = Sample(
        id="r",
        group="g",
        source="policy",
        tokens=(0, 1, 2, 3, 4),
        weights={"policy": (0.0, 1.0, 1.0, 1.0, 1.0)},
        logprobs=(0.0, *behaviour),
        advantages=(0.0, *ADVANTAGES),
    )
    logprob = torch.tensor(old, dtype=dtype, requires_grad=True)
    micro = micro_batch([row], {"policy": 4.0})
    result = PolicyLoss(GrpoConfig(), correction)({"logprob": logprob, "entropy": torch.zeros(4)}, micro)
    result.loss.backward()
    return result.loss.detach(), logprob.grad, result.metrics


def test_weights_by_hand():
    corrected = load_correction("token_truncate", cap=2.0)(
        torch.tensor([-1.0, -1.0, -1.0, -1.0]) + torch.tensor([1.5, 0.5, 1.0, 4.0]).log(),
        torch.full((4,), -1.0),
        torch.tensor([True, True, True, False]),
    )
    assert corrected.weights.tolist() == pytest.approx([1.5, 0.5, 1.0, 2.0])
    assert corrected.metrics["correction_weight"] == (pytest.approx(3.0), 3.0)
    assert corrected.metrics["correction_truncated"] == (0.0, 3.0)  # the last is not the policy's
    more = load_correction("token_truncate", cap=1.2)(torch.tensor([0.0, -9.0]), torch.tensor([-1.0, -1.0]), torch.tensor([True, True]))
    assert more.weights.tolist() == pytest.approx([1.2, math.exp(-8)])
    assert more.metrics["correction_truncated"] == (1.0, 2.0)


def test_the_loss_is_the_weighted_surrogate_in_float64_and_its_gradient_is_that_of_the_log_probability():
    old, behaviour = (-1.0, -2.5, -0.25, -3.0), (-1.5, -2.0, -0.25, -5.0)
    weights = [min(math.exp(a - b), 2.0) for a, b in zip(old, behaviour, strict=True)]  # e^0.5, e^-0.5, 1, capped
    loss, gradient, metrics = loss_of(load_correction("token_truncate", cap=2.0), old, behaviour, torch.float64)
    moved = [a - b for a, b in zip(old, behaviour, strict=True)]
    assert metrics["approx_kl"] == (pytest.approx(sum(math.exp(d) - 1 - d for d in moved), rel=1e-5), 4.0)
    # at one step per batch the ratio to the trainer's own probabilities is 1, whatever the engine said
    assert loss.item() == pytest.approx(-sum(w * a for w, a in zip(weights, ADVANTAGES, strict=True)) / 4, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-w * a / 4 for w, a in zip(weights, ADVANTAGES, strict=True)], rel=1e-6)
    assert (metrics["ratio"], metrics["clip_fraction"]) == ((4.0, 4.0), (0.0, 4.0))
    assert metrics["correction_weight"] == (pytest.approx(sum(weights), rel=1e-6), 4.0)
    assert metrics["correction_truncated"] == (1.0, 4.0)


def test_at_equal_probabilities_nothing_changes_to_the_bit():
    old = (-1.3, -0.7, -2.9, -0.1)
    plain = loss_of(load_correction("none", cap=2.0), old, old)
    default = loss_of(None, old, old)
    corrected = loss_of(load_correction("token_truncate", cap=2.0), old, old)
    for loss, gradient, _ in (default, corrected):
        assert torch.equal(loss, plain[0]) and torch.equal(gradient, plain[1])
    assert corrected[2]["correction_weight"] == (4.0, 4.0)


def test_without_correction_the_ratio_is_to_the_engine():
    _, _, metrics = loss_of(load_correction("none", cap=2.0), (-1.0,) * 4, (-1.5,) * 4)
    assert metrics["ratio"][0] == pytest.approx(4 * math.exp(0.5), rel=1e-6) and "correction_weight" not in metrics


def test_the_weight_has_no_gradient_and_an_impossible_token_stays_finite():
    loss, gradient, _ = loss_of(load_correction("token_truncate", cap=2.0), (-1.0,) * 4, (-9999.0, -1.0, -1.0, -1.0))
    assert gradient.tolist() == pytest.approx([-2.0 / 4, 2.0 / 4, -0.5 / 4, 1.0 / 4]) and torch.isfinite(loss)
