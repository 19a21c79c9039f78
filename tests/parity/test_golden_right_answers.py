"""VAPO's loss against its reference in float64 NumPy, from the scored group to value and gradient."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from golden import right_answers as golden
from golden.mutants import mutants, with_rest
from golden.preference import gradients

from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.denominators import denominators
from sparring.batch.packing import pack
from sparring.batch.plain_groups import nouns, simple_group
from sparring.batch.tensors import micro_batch

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}


def algo(case):
    """The preset, with a credit that asks no critic: advantages are the case's own."""
    settings = {"preset": "vapo", "credit": "reinforce", "right_answers": {"coefficient": case.coefficient}}
    return msgspec.convert(named(settings), AlgoConfig)


def rows_of(case):
    """A group whose rollouts were right as the case says, through the credit, with the case's numbers."""
    lengths = np.bincount(case.rollout).tolist()
    groups, samples = nouns([simple_group(case.right.tolist(), lengths=lengths)])
    [rows] = load_credit(algo(case), seed=0).credit(groups, samples)
    assert len(rows) == len(lengths)
    found = []
    for number, row in enumerate(rows):
        ours, there = case.rollout == number, np.array(row.weights["policy"]) != 0
        columns = {"logprobs": case.behaviour, "advantages": case.advantages, "now": case.logprob}
        filled = {name: np.zeros(len(row.tokens)) for name in columns}
        for name, values in columns.items():
            filled[name][there] = values[ours]
        told = {name: tuple(filled[name].tolist()) for name in ("logprobs", "advantages")}
        found.append((replace(row, **told), case.logprob[ours]))
    return found


def computed(case, dtype, *, budget=10_000):
    """Our loss, added up over micro-batches, and its gradient by the log-probabilities, rollout by rollout."""
    config, given = algo(case), rows_of(case)
    totals = denominators([row for row, _ in given])
    now = {row.id: torch.tensor(values, dtype=dtype, requires_grad=True) for row, values in given}
    total = 0.0
    for packed in pack([row for row, _ in given], budget):
        micro = micro_batch(packed, totals)
        columns = {"behaviour_logprobs": "logprobs", "advantages": "advantages"}
        exact = {
            field: [v for row in packed for v, w in zip(getattr(row, name), row.weights["policy"], strict=True) if w]
            for field, name in columns.items()
        }
        micro = replace(micro, **{field: torch.tensor(values, dtype=dtype) for field, values in exact.items()})
        said = torch.cat([now[row.id] for row in packed])
        quantities = {"logprob": said, "entropy": torch.zeros_like(said)}
        losses = [PolicyLoss(config), ImitateLoss(scale=config.right_answers.coefficient)]
        loss = sum(loss(quantities, micro).loss for loss in losses if loss.term in micro.weights)
        loss.backward()
        total += loss.item()
    return total, np.concatenate([now[row.id].grad.double().numpy() for row, _ in given])


def agreement(case, dtype, reference=golden.vapo):
    """The largest difference of loss and gradient, each relative to the largest of its kind."""
    loss, ours = computed(case, dtype)
    (expected,) = gradients(lambda inputs: reference(inputs[0], case), [case.logprob])
    value = float(np.real(reference(case.logprob, case)))
    return max(abs(loss - value) / abs(value), np.abs(expected - ours).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_are_the_references(dtype):
    for seed in range(6):
        assert agreement(golden.draw(seed), dtype) < RELATIVE[dtype]


def test_the_example_worked_by_hand():
    loss, gradient = computed(golden.hand(), torch.float64)
    assert loss == pytest.approx(0.075, abs=1e-12)
    assert gradient == pytest.approx([-1 / 3 - 0.05, -2 / 3 - 0.05, 1.0], abs=1e-12)


def test_any_micro_batches_give_the_same():
    case = golden.draw(1)
    whole, split = computed(case, torch.float64), computed(case, torch.float64, budget=1)
    assert split[0] == pytest.approx(whole[0], rel=1e-9)
    np.testing.assert_allclose(split[1], whole[1], rtol=1e-9)


def test_one_turned_sign_is_noticed():
    for name, rest in (("policy", golden.right_answers), ("right_answers", golden.policy)):
        every = list(mutants(getattr(golden, name)))
        assert every
        for line, mutant in every:
            whole = with_rest(mutant, rest)
            assert max(agreement(golden.draw(seed), torch.float64, whole) for seed in range(3)) > 1e-3, line
