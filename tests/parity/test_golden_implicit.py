"""What an implicit process reward model learns against its reference in float64 NumPy: from the credited rows to value
and gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden import implicit as golden
from golden.mutants import mutants
from golden.preference import gradients

from sparring.algo.loss.implicit import ImplicitReward
from sparring.batch.denominators import denominators
from sparring.batch.implicit import implicit_rows
from sparring.batch.tensors import micro_batch
from sparring.batch.units import pack_units
from sparring.types import Sample

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}


def credited(case):
    """The rollouts as the credit leaves them, with the places of their tokens: every other one has two branches, which
    differ in their first token and share none."""
    found = []
    for number, right in enumerate(case.right):
        places = np.flatnonzero(case.rollout == number)
        cuts = np.split(places, [len(places) // 2]) if number % 2 and len(places) > 1 else [places]
        for branch, own in enumerate(cuts):
            row = Sample(
                id=f"t{number}#{branch}",
                group="g",
                source="policy",
                tokens=(1, *(100 + own).tolist()),
                weights={"policy": (0.0, *(0.25,) * len(own))},
                advantages=(0.0,) * (len(own) + 1),
                logprobs=(0.0,) * (len(own) + 1),
                annotations={"reference": (0.0, *case.reference[own].tolist()), "right": (0.0, *(right,) * len(own))},
            )
            found.append((row, own))
    return found


def computed(case, dtype, *, budget=10_000):
    """Our loss and its gradient by the M log-probabilities, added up over micro-batches, with the metrics."""
    given = credited(case)
    places = {row.id: own for row, own in given}
    rows = implicit_rows([row for row, _ in given])
    totals, loss = denominators(rows), ImplicitReward(beta=case.beta)
    total, gradient, sums, packs = 0.0, np.zeros(len(case.logprob)), {}, pack_units(rows, budget, {"preference"})
    for packed in packs:
        order = np.concatenate([places[row.id] for row in packed])
        micro = micro_batch(packed, totals)
        weights = torch.tensor([w for row in packed for w in row.weights["preference"] if w], dtype=dtype)
        exact = {
            "weights": {"preference": weights},
            "annotations": {"reference": torch.tensor(case.reference[order], dtype=dtype)},
        }
        said = torch.tensor(case.logprob[order], dtype=dtype, requires_grad=True)
        result = loss({"logprob": said}, replace(micro, **exact))
        result.loss.backward()
        total += result.loss.item()
        gradient[order] += said.grad.double().numpy()
        sums = {name: np.add(sums.get(name, (0.0, 0.0)), pair) for name, pair in result.metrics.items()}
    return total, gradient, sums, len(packs)


def agreement(case, dtype, reference=golden.implicit):
    """The largest difference of loss and gradient, each relative to the largest of its kind."""
    loss, ours, *_ = computed(case, dtype)
    (expected,) = gradients(lambda inputs: reference(inputs[0], case), [case.logprob])
    value = float(np.real(reference(case.logprob, case)))
    return max(abs(loss - value) / abs(value), np.abs(expected - ours).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_are_the_references(dtype):
    for seed in range(8):
        assert agreement(golden.draw(seed), dtype) < RELATIVE[dtype]


def test_the_example_worked_by_hand():
    loss, gradient, metrics, _ = computed(golden.hand(), torch.float64)
    assert loss == pytest.approx(0.6436693, abs=1e-7)
    assert gradient == pytest.approx([-0.0672354, -0.0672354, 0.1556148], abs=1e-7)
    assert {name: tuple(pair) for name, pair in metrics.items()} == {
        "accuracy": (1.0, 2.0),
        "reward_chosen": (1.0, 1.0),
        "reward_rejected": (0.5, 1.0),
    }


def test_the_gradient_is_that_of_finite_differences():
    case, step = golden.draw(2), 1e-6
    _, ours, *_ = computed(case, torch.float64)
    for at in range(len(case.logprob)):
        moved = [case._replace(logprob=case.logprob + sign * step * np.eye(len(case.logprob))[at]) for sign in (1, -1)]
        either = [computed(of, torch.float64)[0] for of in moved]
        assert (either[0] - either[1]) / (2 * step) == pytest.approx(ours[at], abs=1e-8)


def test_micro_batches_never_split_a_trajectory_and_give_the_same():
    case = golden.draw(3)
    whole, split = computed(case, torch.float64), computed(case, torch.float64, budget=1)
    assert (whole[3], split[3]) == (1, len(case.right)) and len(credited(case)) > len(case.right)
    assert split[0] == pytest.approx(whole[0], rel=1e-9)
    np.testing.assert_allclose(split[1], whole[1], rtol=1e-9)
    assert whole[2]["accuracy"][1] == split[2]["accuracy"][1] == len(case.right)


def test_one_turned_sign_is_noticed():
    every = list(mutants(golden.implicit))
    assert len(every) >= 5
    for line, mutant in every:
        with np.errstate(invalid="ignore"):  # the logarithm of what is no probability any more
            assert not all(agreement(golden.draw(seed), torch.float64, mutant) <= 1e-3 for seed in range(4)), line


def test_a_model_that_is_its_reference_knows_nothing():
    case = golden.draw(0)
    loss, _, metrics, _ = computed(case._replace(logprob=case.reference), torch.float64)
    assert loss == pytest.approx(np.log(2)) and tuple(metrics["accuracy"]) == (2.5, 5.0)
