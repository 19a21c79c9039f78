"""The imitate term, alone and beside the policy's, against its reference in float64 NumPy; what was not sampled has no
temperature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden import imitate as golden
from golden.mutants import mutants, with_rest
from golden.preference import gradients

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.tensors import micro_batch
from sparring.types import Sample

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5}


def row(case: golden.ImitateCase) -> Sample:
    """The case as a row, behind a token that nothing predicts."""
    ours = case.sampled != 0
    return Sample(
        id="r#0",
        group="g",
        source="policy",
        tokens=(0, *case.targets.tolist()),
        weights={"policy": (0.0, *case.sampled.tolist()), "imitate": (0.0, *case.observed.tolist())},
        logprobs=(0.0, *np.where(ours, case.behaviour, 0.0).tolist()),
        advantages=(0.0, *np.where(ours, case.advantages, 0.0).tolist()),
        versions=(-1, *np.where(ours, 0, -1).tolist()),
        kv_versions=(-1, *np.where(ours, 0, -1).tolist()),
        temperature=case.temperature,
    )


def computed(name: str, case: golden.ImitateCase, dtype: torch.dtype) -> tuple[float, np.ndarray]:
    """Our loss and its gradient by the logits, at the temperatures that the micro-batch says."""
    of = row(case)
    micro = micro_batch([of], {term: sum(weights) for term, weights in of.weights.items()})
    logits = torch.tensor(case.logits, dtype=dtype, requires_grad=True)
    there = torch.tensor(
        [place - 1 for place in range(1, len(of.tokens)) if any(w[place] for w in of.weights.values())]
    )
    logs = (logits[there] / micro.temperature.to(dtype)[:, None]).log_softmax(1)
    quantities = {"logprob": logs.gather(1, micro.targets[:, None])[:, 0], "entropy": -(logs.exp() * logs).sum(1)}
    exact = {
        "behaviour_logprobs": case.behaviour * (case.sampled != 0),
        "advantages": case.advantages * (case.sampled != 0),
    }
    micro = replace(micro, **{key: torch.tensor(value, dtype=dtype)[there] for key, value in exact.items()})
    losses = [ImitateLoss(scale=case.scale), *([PolicyLoss(AlgoConfig())] if name == "echo" else [])]
    loss = sum(loss(quantities, micro).loss for loss in losses)
    loss.backward()
    return loss.item(), logits.grad.double().numpy()


def agreement(name: str, case: golden.ImitateCase, dtype: torch.dtype, reference: object = None) -> float:
    """The largest difference of loss and gradient, each relative to the largest of its kind."""
    of = reference or golden.REFERENCES[name]
    loss, ours = computed(name, case, dtype)
    (expected,) = gradients(lambda inputs: of(inputs[0], case), [case.logits])
    value = float(np.real(of(case.logits, case)))
    return max(abs(loss - value) / abs(value), np.abs(expected - ours).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", golden.REFERENCES)
def test_value_and_gradient_are_the_references(name, dtype):
    for seed in range(5):
        assert agreement(name, golden.draw(seed), dtype) < RELATIVE[dtype]


def test_the_example_worked_by_hand():
    loss, gradient = computed("echo", golden.hand(), torch.float64)
    assert loss == pytest.approx(-1.985616, abs=1e-6)
    assert gradient == pytest.approx(np.array([[-0.4, 0.4], [-0.0125, 0.0125]]), abs=1e-12)
    assert computed("imitate", golden.hand(), torch.float64)[0] == pytest.approx(0.014384, abs=1e-6)


@pytest.mark.parametrize("name", ["imitate", "policy"])
def test_one_turned_sign_is_noticed(name):
    every = list(mutants(getattr(golden, name)))
    assert len(every) >= 2
    of, rest = ("imitate", lambda *_: 0.0) if name == "imitate" else ("echo", golden.imitate)
    for line, mutant in every:
        wrong = [agreement(of, golden.draw(seed), torch.float64, with_rest(mutant, rest)) for seed in range(3)]
        assert max(wrong) > 1e-3, line


def test_a_token_of_zero_advantage_keeps_its_temperature():
    """What was sampled is compared with what the engine recorded, also where the imitate term alone has a use for
    it."""
    case = golden.draw(0)
    both = row(case._replace(advantages=np.zeros(8), observed=case.observed + case.sampled))
    found = micro_batch([both], {"policy": 5.0, "imitate": 6.5}).temperature
    assert found.tolist() == [0.75, 0.75, 1.0, 1.0, 0.75, 0.75, 0.75]
