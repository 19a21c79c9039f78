"""The critic's loss against its reference in float64 NumPy: values, gradients, the example by hand, packing, and proof
that it bites."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden import value as golden
from golden.mutants import mutants
from golden.preference import gradients

from sparring.algo.loss.value import ValueLoss
from sparring.batch.packing import pack
from sparring.batch.tensors import micro_batch
from sparring.stages.models.critic import explained_variance
from sparring.types import Sample

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}


def row(case, *, number=0):
    """The case as one row, behind a token that nothing predicts."""
    return Sample(
        id=f"r{number}#0",
        group=f"g{number}",
        source="policy",
        tokens=(1, *(10 + 20 * number + at for at in range(len(case.now)))),
        weights={"value": (0.0, *case.weights.tolist())},
        annotations={"value": (0.0, *case.old.tolist()), "return": (0.0, *case.earned.tolist())},
    )


def computed(rows, given, *, clip, dtype=torch.float64, denominator=None):
    """The loss of these rows, its gradient, and its metrics, where the critic says `given` [M]."""
    micro = micro_batch(rows, {"value": denominator or sum(map(sum, (r.weights["value"] for r in rows)))})
    columns = {"weights": {"value": [w for r in rows for w in r.weights["value"][1:]]}}
    columns["annotations"] = {name: [v for r in rows for v in r.annotations[name][1:]] for name in ("value", "return")}
    exact = {key: {name: torch.tensor(v, dtype=dtype) for name, v in of.items()} for key, of in columns.items()}
    values = torch.tensor(given, dtype=dtype, requires_grad=True)
    result = ValueLoss(clip=clip)({"value": values}, replace(micro, **exact))
    result.loss.backward()
    return result.loss.item(), values.grad.double().numpy(), result.metrics


def agreement(reference, clip, dtype, seed):
    """The largest difference of loss and gradient, each relative to the largest of its kind."""
    case = golden.draw(seed)
    found, ours, _ = computed([row(case)], case.now, clip=clip, dtype=dtype)
    (expected,) = gradients(lambda inputs: reference(inputs[0], case, clip=clip), [case.now])
    value = float(np.real(reference(case.now, case, clip=clip)))
    return max(abs(found - value) / abs(value), np.abs(expected - ours).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("clip", golden.CLIPS)
def test_value_and_gradient_are_the_references(clip, dtype):
    for seed in range(8):
        assert agreement(golden.value, clip, dtype, seed) < RELATIVE[dtype]


def test_the_gradient_is_that_of_finite_differences():
    case, step = golden.draw(3), 1e-6
    _, ours, _ = computed([row(case)], case.now, clip=0.2)
    for at in range(len(case.now)):
        either = [
            computed([row(case)], case.now + sign * step * np.eye(len(case.now))[at], clip=0.2)[0] for sign in (1, -1)
        ]
        assert (either[0] - either[1]) / (2 * step) == pytest.approx(ours[at], abs=1e-8)


def test_one_turned_sign_is_noticed():
    every = list(mutants(golden.value))
    assert len(every) >= 5
    for line, mutant in every:
        assert max(agreement(mutant, clip, torch.float64, seed) for clip in golden.CLIPS for seed in range(4)) > 1e-3, (
            line
        )


def test_the_example_worked_by_hand():
    case = golden.ValueCase(np.full(3, 0.5), np.array([0.6, 1.0, 1.0]), np.array([1.0, 1.0, 0.0]), np.ones(3))
    loss, gradient, metrics = computed([row(case)], case.now, clip=0.2)
    assert loss == pytest.approx(0.2083333, abs=1e-7)
    assert gradient == pytest.approx([-0.4 / 3, 0.0, 1 / 3], abs=1e-12)
    assert metrics["clip_fraction"] == (1.0, 3.0)
    assert explained(metrics) == pytest.approx(-0.56) == golden.explained_variance(case.now, case.earned)


def test_any_packing_gives_the_same():
    cases = [golden.draw(seed, 5 + seed) for seed in range(6)]
    rows = [row(case, number=n) for n, case in enumerate(cases)]
    said = {r.id: case.now for r, case in zip(rows, cases, strict=True)}
    total = sum(float(case.weights.sum()) for case in cases)
    loss, gradient, metrics = computed(rows, np.concatenate([case.now for case in cases]), clip=0.2)
    slices = dict(zip(said, np.split(gradient, np.cumsum([len(case.now) for case in cases])[:-1]), strict=True))
    packs, found, sums = pack(rows, 14), 0.0, {}
    assert len(packs) > 2
    for part in packs:
        value, of_part, measured = computed(
            part, np.concatenate([said[r.id] for r in part]), clip=0.2, denominator=total
        )
        found += value
        sums = {name: np.add(sums.get(name, (0.0, 0.0)), pair) for name, pair in measured.items()}
        for r, own in zip(part, np.split(of_part, np.cumsum([len(said[r.id]) for r in part])[:-1]), strict=True):
            np.testing.assert_allclose(own, slices[r.id], rtol=1e-9)
    assert found == pytest.approx(loss, rel=1e-9)
    assert explained(sums) == pytest.approx(explained(metrics), rel=1e-9)
    earned, now = (np.concatenate([getattr(case, name) for case in cases]) for name in ("earned", "now"))
    assert explained(metrics) == pytest.approx(golden.explained_variance(now, earned), rel=1e-9)


def test_values_that_say_what_was_earned_explain_everything():
    case = golden.draw(1)
    loss, gradient, metrics = computed([row(case)], case.earned, clip=0.0)
    assert (loss, explained(metrics)) == (0.0, 1.0) and not gradient.any() and metrics["clip_fraction"][0] == 0.0
    flat = case._replace(earned=np.ones(len(case.now)))
    assert explained(computed([row(flat)], flat.now, clip=0.2)[2]) is None, "nothing varies that could be explained"


def explained(metrics):
    means = {name: amount / count for name, (amount, count) in metrics.items()}
    return explained_variance(
        means["return"], **{name: means[name] for name in ("return_square", "error", "error_square")}
    )
