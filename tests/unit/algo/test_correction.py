"""Corrections for an engine whose probabilities are not the trainer's, on hand-made log-probabilities."""

import math
from dataclasses import replace

import pytest
import torch

from sparring.algo.config import AlgoConfig
from sparring.algo.correction.presets import CORRECTIONS
from sparring.algo.correction.rule import Correction
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.tokens import PolicyTokens
from sparring.batch.tensors import micro_batch
from sparring.types import Sample

ADVANTAGES = (1.0, -2.0, 0.5, -1.0)


def config_of(rule):
    return AlgoConfig(correction=rule, anchor="behaviour" if rule.weight == "none" else "proximal")


def loss_of(config, old, behaviour, dtype=torch.float32):
    """The policy loss over four tokens, its gradient by their log-probabilities, and the metrics."""
    row = Sample(
        id="r#0",
        group="g",
        source="policy",
        tokens=(0, 1, 2, 3, 4),
        weights={"policy": (0.0, 1.0, 1.0, 1.0, 1.0)},
        logprobs=(0.0, *behaviour),
        advantages=(0.0, *ADVANTAGES),
    )
    logprob = torch.tensor(old, dtype=dtype, requires_grad=True)
    micro, quantities, loss = (
        micro_batch([row], {"policy": 4.0}),
        {"logprob": logprob, "entropy": torch.zeros(4)},
        PolicyLoss(config),
    )
    micro = replace(micro, annotations=loss.survey(quantities, micro))
    result = loss(quantities, micro)
    result.loss.backward()
    return result.loss.detach(), logprob.grad, result.metrics


def tokens_of(weights, rows=None, turns=None, advantages=None, ours=None):
    """Tokens whose behaviour is at -1 and what the trainer says: the logarithm of `weights` more."""
    count = len(weights)
    old = torch.full((count,), -1.0) + torch.tensor(weights).log()
    tokens = PolicyTokens(
        logprob=old,
        anchor=old,
        behaviour=torch.full((count,), -1.0),
        advantages=torch.tensor(advantages or [1.0] * count),
        entropy=torch.zeros(count),
        weighted=torch.tensor(ours or [True] * count),
        sequences=torch.tensor(rows or [0] * count),
        turns=torch.tensor(turns or [0] * count),
        annotations={},
    )
    return old, tokens


def test_token_weights_by_hand():
    corrected = Correction(weight="token", high=2.0)(*tokens_of([1.5, 0.5, 1.0, 4.0], ours=[True, True, True, False]))
    assert corrected.weights.tolist() == pytest.approx([1.5, 0.5, 1.0, 2.0])
    assert corrected.columns["correction_weight"] is corrected.weights
    assert corrected.columns["correction_truncated"].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Correction(weight="token", bound="mask", low=0.8, high=1.5), [1.25, 0.0, 0.0, 1.0, 1.5]),
        (Correction(weight="turn", high=10.0), [0.625, 0.625, 2.0, 1.5, 1.5]),
        (Correction(weight="sequence", high=10.0), [1.25, 1.25, 1.25, 1.5, 1.5]),
        (Correction(weight="sequence", bound="mask", high=1.4), [1.25, 1.25, 1.25, 0.0, 0.0]),
        (Correction(weight="geometric", high=10.0), [1.25 ** (1 / 3)] * 3 + [1.5**0.5] * 2),
    ],
)
def test_units_and_bounds_by_hand(rule, expected):
    """Two rows; the first has two turns, of weights (1.25, 0.5) and (2.0), the second one turn of (1.0, 1.5)."""
    corrected = rule(*tokens_of([1.25, 0.5, 2.0, 1.0, 1.5], rows=[0, 0, 0, 1, 1], turns=[0, 0, 1, 2, 2]))
    assert corrected.weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_seq_mask_tis_keeps_raw_ratios_where_the_geometric_mean_is_near_1():
    """NeMo RL's: the mean of the first row is 0.9995, of the second 1.0392, of the third 0.4472."""
    ratios = [1.35, 0.74, 1.2, 0.9, 4.0, 0.05]
    corrected = Correction(**CORRECTIONS["seq_mask_tis"])(*tokens_of(ratios, rows=[0, 0, 1, 1, 2, 2]))
    assert corrected.weights.tolist() == pytest.approx([1.35, 0.74, 0.0, 0.0, 0.0, 0.0], rel=1e-6)
    assert corrected.columns["correction_rejected"].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert corrected.columns["correction_truncated"].tolist() == [0.0] * 6
    high = Correction(**CORRECTIONS["seq_mask_tis"])(*tokens_of([1000.0, 1 / 1000.0]))
    assert high.weights.tolist() == pytest.approx([1000.0, 0.001], rel=1e-4), "whatever they are"


@pytest.mark.parametrize(
    ("rule", "rejected"),
    [
        (Correction(reject="k1", reject_above=0.1), [False] * 3 + [True] * 2),
        (Correction(reject="k1", reject_above=0.1, only_negative=True), [False] * 4 + [True]),
        (Correction(reject="k2", reject_unit="token", reject_above=0.2), [False, True, True, False, False]),
        (
            Correction(reject="k2", reject_unit="turn", reject_by="max", reject_above=0.2),
            [True, True, True, False, False],
        ),
        (Correction(reject="k3", reject_by="sum", reject_above=0.4), [True] * 3 + [False] * 2),
    ],
)
def test_rejection_by_hand(rule, rejected):
    """d = log of (1.25, 0.5, 2.0 | 1.0, 0.6): mean k1 of the rows -0.074 and 0.255, k3 of the tokens 0.027, 0.193,
    0.307 | 0, 0.111."""
    values = tokens_of(
        [1.25, 0.5, 2.0, 1.0, 0.6], rows=[0, 0, 0, 1, 1], turns=[0, 0, 1, 2, 2], advantages=[1.0, 1.0, 1.0, 1.0, -1.0]
    )
    corrected = rule(*values)
    assert corrected.weights.tolist() == [0.0 if gone else 1.0 for gone in rejected]
    assert corrected.columns["correction_rejected"].tolist() == [float(gone) for gone in rejected]


def test_measured_only_leaves_every_weight_at_one():
    corrected = Correction(weight="token", metrics_only=True)(*tokens_of([1.5, 4.0]))
    assert corrected.weights.tolist() == [1.0, 1.0]
    assert corrected.columns["correction_weight"].tolist() == pytest.approx([1.5, 2.0])


def test_the_loss_is_the_weighted_surrogate_in_float64_and_its_gradient_is_that_of_the_log_probability():
    old, behaviour = (-1.0, -2.5, -0.25, -3.0), (-1.5, -2.0, -0.25, -5.0)
    weights = [min(math.exp(a - b), 2.0) for a, b in zip(old, behaviour, strict=True)]  # e^0.5, e^-0.5, 1, capped
    loss, gradient, metrics = loss_of(config_of(Correction(weight="token")), old, behaviour, torch.float64)
    moved = [a - b for a, b in zip(old, behaviour, strict=True)]
    assert metrics["approx_kl"] == (pytest.approx(sum(math.exp(d) - 1 - d for d in moved), rel=1e-5), 4.0)
    # at one step per batch the ratio to the trainer's own probabilities is 1, whatever the engine said
    assert loss.item() == pytest.approx(-sum(w * a for w, a in zip(weights, ADVANTAGES, strict=True)) / 4, rel=1e-6)
    assert gradient.tolist() == pytest.approx([-w * a / 4 for w, a in zip(weights, ADVANTAGES, strict=True)], rel=1e-6)
    assert (metrics["ratio"], metrics["clip_fraction"]) == ((4.0, 4.0), (0.0, 4.0))
    assert metrics["correction_weight"] == (pytest.approx(sum(weights), rel=1e-6), 4.0)
    assert metrics["correction_truncated"] == (1.0, 4.0)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_at_equal_probabilities_nothing_changes_to_the_bit(name):
    old = (-1.3, -0.7, -2.9, -0.1)
    plain = loss_of(AlgoConfig(), old, old)
    loss, gradient, metrics = loss_of(config_of(Correction(**CORRECTIONS[name])), old, old)
    assert torch.equal(loss, plain[0]) and torch.equal(gradient, plain[1])
    assert (metrics["ratio"], metrics["approx_kl"], metrics["clip_fraction"]) == ((4.0, 4.0), (0.0, 4.0), (0.0, 4.0))
    assert metrics.get("correction_weight", (4.0, 4.0)) == (4.0, 4.0)
    assert metrics.get("correction_rejected", (0.0, 4.0)) == (0.0, 4.0)


def test_tokens_of_another_term_are_in_no_metric():
    weights = {"policy": (0.0, 1.0, 1.0, 0.0), "imitate": (0.0, 0.0, 0.0, 1.0)}
    row = Sample(
        id="r#0", group="g", source="policy", tokens=(0, 1, 2, 3), weights=weights, logprobs=(0.0, -2.0, -1.0, 0.0)
    )
    micro = micro_batch([replace(row, advantages=(0.0, 1.0, 1.0, 0.0))], {"policy": 2.0, "imitate": 1.0})
    quantities = {"logprob": torch.tensor([-1.0, -1.0, -9.0]), "entropy": torch.ones(3)}
    metrics = PolicyLoss(config_of(Correction(weight="token", high=2.0)))(quantities, micro).metrics
    assert metrics["correction_weight"] == (3.0, 2.0) and metrics["correction_truncated"] == (1.0, 2.0)
    assert metrics["entropy"] == (2.0, 2.0)


def test_without_correction_the_ratio_is_to_the_engine():
    _, _, metrics = loss_of(AlgoConfig(), (-1.0,) * 4, (-1.5,) * 4)
    assert metrics["ratio"][0] == pytest.approx(4 * math.exp(0.5), rel=1e-6) and "correction_weight" not in metrics


def test_the_weight_has_no_gradient_and_an_impossible_token_stays_finite():
    loss, gradient, _ = loss_of(config_of(Correction(weight="token")), (-1.0,) * 4, (-9999.0, -1.0, -1.0, -1.0))
    assert gradient.tolist() == pytest.approx([-2.0 / 4, 2.0 / 4, -0.5 / 4, 1.0 / 4]) and torch.isfinite(loss)
