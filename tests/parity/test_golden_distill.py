"""Distillation against its equations: value and gradient, in float64 and float32, and no mutated sign gets past
them."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from golden import distill as golden

import sparring
from sparring.algo.loss import distill
from sparring.batch.tensors import MicroBatch, micro_batch
from sparring.generation import TopRows
from sparring.model import divergence
from sparring.model.head import TargetRows
from sparring.protocols import Divergence
from sparring.types import Sample


class Identity:
    """A head whose output is its input."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def rows_of(case: golden.DistillCase) -> MicroBatch:
    """The case as a micro-batch: one row, whose first token nothing predicts."""
    ids, logprobs = golden.likeliest(case)
    pairs = [list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
    row = Sample(
        id="r",
        group="g",
        source="policy",
        tokens=(0, *case.targets.tolist()),
        weights={"distill": (0.0, *case.weights.tolist()), "imitate": (0.0, *[1.0] * len(case.targets))},
        logprobs=(0.0, *case.behaviour.tolist()),
        temperature=case.temperature,
        annotations={"teacher": (0.0, *golden.teacher_logprobs(case).tolist())},
        tops=TopRows.of([[], *pairs]),
    )
    return micro_batch([row], {"distill": case.denominator, "imitate": 1.0})


def found(
    name: str,
    case: golden.DistillCase,
    dtype: torch.dtype,
    losses: ModuleType = distill,
    heads: ModuleType = divergence,
) -> tuple[float, np.ndarray]:
    """Our loss and its gradient by the student's logits."""
    over, _, kind = name.partition("/")
    micro = rows_of(case)
    logits = torch.tensor(case.logits, dtype=dtype, requires_grad=True)
    heat = micro.temperature.to(dtype)
    quantities = {"logprob": (logits / heat[:, None]).log_softmax(1).gather(1, micro.targets[:, None])[:, 0]}
    if over == "token":
        loss = losses.SampledDistillLoss(kind, ratio_cap=case.ratio_cap)
    else:
        form = Divergence(kind=kind, over=over, beta=case.beta)
        loss = losses.DistillLoss(form)
        if over == "top_k":
            quantities["divergence"] = heads.from_tops(Identity(), logits, heat, micro.tops, form)
        else:
            teacher = torch.tensor(case.teacher_logits, dtype=dtype)
            quantities["divergence"] = heads.from_teacher(
                Identity(), logits, Identity(), teacher, TargetRows(micro.targets, heat, None, None), form
            )
    result = loss(quantities, micro)
    result.loss.backward()
    return result.loss.item(), logits.grad.double().numpy()


def agrees(name: str, case: golden.DistillCase, dtype: torch.dtype, **modules: ModuleType) -> bool:
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    loss, slopes = found(name, case, dtype, **modules)
    expected, wanted = golden.value(name, case), golden.gradient(name, case)
    scale = np.abs(wanted).max()
    return abs(loss - expected) <= tolerance * abs(expected) and bool(
        (np.abs(slopes - wanted) <= tolerance * scale).all()
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", golden.REFERENCES)
def test_value_and_gradient(name: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        assert agrees(name, golden.case(seed), dtype)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_the_likeliest_of_all_are_the_vocabulary(kind: str) -> None:
    case = golden.case(top_k=9)
    for whole, part in zip(
        found(f"vocabulary/{kind}", case, torch.float64), found(f"top_k/{kind}", case, torch.float64), strict=True
    ):
        assert np.allclose(whole, part, rtol=1e-6, atol=1e-8)  # the teacher's log-probabilities travel as float32
    few = [found(f"top_k/{kind}", golden.case(top_k=k), torch.float64)[0] for k in range(1, 9)]
    assert few == sorted(few), "merging outcomes never raises a divergence"


def test_the_worked_example() -> None:
    forward, reverse = math.log(4 / 3) / 2, 0.75 * math.log(1.5) - 0.25 * math.log(2)
    mixture = (math.log(4 / 5) + math.log(4 / 3)) / 4 + (3 * math.log(6 / 5) + math.log(2 / 3)) / 8
    by_hand = {
        "token/policy_gradient": math.log(1.5),
        "token/squared": math.log(1.5) ** 2 / 2,
        **{
            f"{over}/{kind}": number
            for over in ("top_k", "vocabulary")
            for kind, number in (("forward", forward), ("reverse", reverse), ("jensen_shannon", mixture))
        },
    }
    for name, number in by_hand.items():
        assert golden.value(name, golden.hand()) == pytest.approx(number, rel=1e-7)
        assert found(name, golden.hand(), torch.float64)[0] == pytest.approx(number, rel=1e-7)
    page = golden.__doc__ or ""
    assert all(f"{number:.6f}" in page for number in by_hand.values())


MUTATIONS = {
    "token/policy_gradient": ("algo/loss/distill.py", "gap = logprob - ", "gap = logprob + "),
    "token/squared": ("algo/loss/distill.py", "gap = logprob - ", "gap = logprob + "),
    "top_k/reverse": ("model/divergence.py", "log_rest = (1.0 - ", "log_rest = (1.0 + "),
    "top_k/forward": (
        "model/divergence.py",
        "logsumexp(1, keepdim=True) - log_z",
        "logsumexp(1, keepdim=True) + log_z",
    ),
    "top_k/jensen_shannon": ("model/divergence.py", "ids.where(valid, 0)) - log_z", "ids.where(valid, 0)) + log_z"),
    "vocabulary/reverse": ("model/divergence.py", "(a - b)", "(a + b)"),
    "vocabulary/forward": ("model/divergence.py", "(a - b)", "(b - a)"),
    "vocabulary/jensen_shannon": ("model/divergence.py", "(1.0 - form.beta)", "(1.0 + form.beta)"),
}


@pytest.mark.parametrize("name", golden.REFERENCES)
def test_a_mutated_sign_is_found(name: str) -> None:
    file, sign, other = MUTATIONS[name]
    source = (Path(sparring.__file__).parent / file).read_text()
    assert source.count(sign) == 1
    mutant = ModuleType("mutant")
    exec(compile(source.replace(sign, other), file, "exec"), mutant.__dict__)
    assert not agrees(name, golden.case(), torch.float64, **{"losses" if "loss" in file else "heads": mutant})


def test_equal_distributions_are_exactly_equal() -> None:
    """At equal weights: divergence 0 and no gradient, however the teacher is asked."""
    case = golden.case()
    alike = golden.DistillCase(**{**vars(case), "teacher_logits": case.logits})
    for kind in ("reverse", "forward"):
        loss, slopes = found(f"vocabulary/{kind}", alike, torch.float32)
        assert loss == 0 and np.abs(slopes).max() <= 1e-7


def test_rows_without_a_teacher_and_ids_that_the_model_lacks_belong_to_the_rest() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 7], [-1, -1]])
    logprobs = torch.tensor([[math.log(0.5), math.log(0.25)], [-math.inf, -math.inf]])
    form = Divergence(kind="reverse", over="top_k")
    values = divergence.from_tops(Identity(), logits, torch.ones(2, dtype=torch.float64), (ids, logprobs), form)
    q = logits.detach()[0].softmax(0)[0].item()
    assert values.tolist() == pytest.approx([q * math.log(q / 0.5) + (1 - q) * math.log((1 - q) / 0.5), 0.0], rel=1e-6)
    values.sum().backward()
    assert bool(logits.grad.isfinite().all()) and logits.grad[1].abs().max() == 0
