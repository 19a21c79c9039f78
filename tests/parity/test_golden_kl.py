"""The KL over the vocabulary and the moving average against their equations: value and gradient, and no mutated sign
gets past them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from golden import kl as golden
from golden.mutants import OPERATORS, mutants

from sparring.algo.config import AlgoConfig
from sparring.algo.kl import Kl
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.tensors import MicroBatch, micro_batch
from sparring.generation import KeptSets
from sparring.model.divergence import CHUNK_ROWS, from_teacher
from sparring.model.head import TargetRows
from sparring.protocols import Divergence
from sparring.train.average import follow
from sparring.types import Sample

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
SEEDS = range(3)


class Identity:
    """A head whose output is its input."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def targets(case: dict[str, Any]) -> list[int]:
    """Of each token the first id that was kept."""
    return [ids[0] if ids else 0 for ids in case["kept"]]


def rows_of(case: dict[str, Any], part: list[int]) -> MicroBatch:
    """Some of the case's tokens as a micro-batch of one row, whose first token nothing predicts; their advantages are
    0."""
    count = len(part) + 1
    row = Sample(
        id="r",
        group="g",
        source="policy",
        tokens=(0, *(targets(case)[place] for place in part)),
        weights={"policy": (0.0, *(case["weights"][place] for place in part)), "imitate": (0.0, *[1.0] * len(part))},
        logprobs=(0.0,) * count,
        advantages=(0.0,) * count,
        temperature=case["temperature"],
        kept=KeptSets.of([(), *(case["kept"][place] for place in part)]),
        bias=((), *(tuple(case["biases"][place].items()) for place in part)),
    )
    return micro_batch([row], {"policy": case["denominator"], "imitate": 1.0}, idle_tokens=True)


def found(case: dict[str, Any], dtype: torch.dtype, parts: list[list[int]] | None = None) -> tuple[float, np.ndarray]:
    """Our loss and its gradient by the policy's logits, over micro-batches of these tokens each."""
    loss = PolicyLoss(AlgoConfig(kl=Kl(coefficient=case["coefficient"], estimator="full")))
    logits = torch.tensor(case["logits"], dtype=dtype, requires_grad=True)
    total = 0.0
    for part in parts or [list(range(len(case["logits"])))]:
        micro = rows_of(case, part)
        bias = (*micro.bias[:2], micro.bias[2].to(dtype))
        asked = TargetRows(micro.targets, micro.temperature.to(dtype), micro.kept, bias)
        theirs = torch.tensor(case["reference"], dtype=dtype)[part]
        zero = torch.zeros(len(part), dtype=dtype)
        quantities = {
            "logprob": zero.clone().requires_grad_(True),
            "entropy": zero,
            "divergence": from_teacher(Identity(), logits[part], Identity(), theirs, asked, Divergence(kind="reverse")),
        }
        micro = replace(
            micro, weights={"policy": torch.tensor([case["weights"][place] for place in part], dtype=dtype)}
        )
        result = loss(quantities, micro)
        result.loss.backward()
        total += result.loss.item()
    return total, logits.grad.double().numpy()


def agrees(ours: tuple[float, np.ndarray], expected: dict[str, Any], tolerance: float) -> bool:
    loss, wanted = expected["loss"], np.array(expected["gradient"])
    return abs(ours[0] - loss) <= tolerance * abs(ours[0]) and bool(
        (np.abs(ours[1] - wanted) <= tolerance * np.abs(ours[1]).max()).all()
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", SEEDS)
def test_value_and_gradient_of_the_whole_divergence(seed: int, dtype: torch.dtype) -> None:
    """In one micro-batch and in several: with kept sets, biases, a temperature."""
    case = golden.draw(seed)
    for parts in (None, [[0, 1, 2], [3, 4, 5]], [[place] for place in range(6)]):
        assert agrees(found(case, dtype, parts), golden.full(case), TOLERANCE[dtype])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_references_gradient_is_that_of_finite_differences(seed: int) -> None:
    case = golden.draw(seed)
    expected = np.array(golden.full(case)["gradient"])
    for place in np.ndindex(*expected.shape):
        moved = []
        for step in (1e-5, -1e-5):
            logits = np.array(case["logits"])
            logits[place] += step
            moved.append(golden.full({**case, "logits": logits})["loss"])
        assert (moved[0] - moved[1]) / 2e-5 == pytest.approx(expected[place], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", [*golden.PARTS, "full"])
def test_a_wrong_operator_is_found(name: str) -> None:
    """Every operator of the reference, turned round, gives another answer in some case."""
    case = golden.draw(0)
    ours = found(case, torch.float64)
    wrong = list(mutants(golden.PARTS.get(name, golden.full), OPERATORS))
    assert len(wrong) >= 3
    for line, mutant in wrong:
        with np.errstate(all="ignore"):
            given = mutant(case) if name == "full" else golden.full(case, {**golden.PARTS, name: mutant})
        assert not agrees(ours, given, 1e-9), line


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_at_equal_distributions_it_is_exactly_nothing(dtype: torch.dtype) -> None:
    case = golden.draw(0)
    loss, slopes = found({**case, "reference": case["logits"]}, dtype)
    assert loss == 0.0 and np.abs(slopes).max() <= 1e-7


class Recording:
    """A head of large logits that knows of how many rows it was asked at once."""

    def __init__(self) -> None:
        self.weight = torch.linspace(-1, 1, 4 * 50, dtype=torch.float64).view(4, 50).requires_grad_(True)
        self.rows: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.weight


def test_the_logits_of_all_tokens_never_exist_at_once() -> None:
    """Chunk by chunk, also in the backward pass, and the same as from whole logits."""
    model, reference, count = Recording(), Recording(), 2 * CHUNK_ROWS + 7
    draw = torch.Generator().manual_seed(5)
    hidden, theirs = (torch.randn(count, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    kept = [sorted({place % 50, (7 * place + 3) % 50, 11}) if place % 3 else [] for place in range(count)]
    offsets = torch.tensor([0, *np.cumsum([len(ids) for ids in kept])])
    rows = offsets, torch.tensor([token for ids in kept for token in ids], dtype=torch.int32)
    asked = TargetRows(torch.full((count,), 11), torch.full((count,), 0.7, dtype=torch.float64), rows, None)
    form = Divergence(kind="reverse")
    value = from_teacher(model, hidden, reference, theirs, asked, form)
    value.sum().backward()
    assert max(model.rows + reference.rows) == CHUNK_ROWS and sum(model.rows) == 2 * count, (
        "computed again for the gradient"
    )
    q, p = (
        golden.probabilities((of @ model.weight.detach()).numpy(), [{}] * count, kept, 0.7) for of in (hidden, theirs)
    )
    assert np.abs(value.detach().numpy() - golden.divergence(q, p)).max() < 1e-12
    expected = hidden.numpy().T @ golden.slopes(q, p, 0.7)
    assert np.abs(model.weight.grad.numpy() - expected).max() < 1e-9 and reference.weight.grad is None


def test_the_worked_examples() -> None:
    logs = np.log(np.array([[3.0, 1.0, 4.0], [1.0, 1.0, 2.0]]))
    case = {**golden.draw(0), "logits": logs[:1].tolist(), "reference": logs[1:].tolist(), "biases": [{}], "kept": [[]]}
    case |= {"temperature": 1.0, "weights": [1.0], "denominator": 1.0, "coefficient": 1.0}
    whole = 3 / 8 * math.log(3 / 2) + 1 / 8 * math.log(1 / 2)
    part = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    slope = 3 / 4 * (math.log(3 / 2) - part)
    for kept, number in (([], whole), ([0, 1], part)):
        of = {**case, "kept": [kept]}
        assert golden.full(of)["loss"] == pytest.approx(number, rel=1e-12)
        assert found(of, torch.float64)[0] == pytest.approx(number, rel=1e-12)
    assert found({**case, "kept": [[0, 1]]}, torch.float64)[1][0] == pytest.approx([slope, -slope, 0.0], rel=1e-12)
    assert golden.average(0.5, np.array(1.0), [np.array(3.0), np.array(5.0)]) == [2.0, 3.5]
    page = golden.__doc__ or ""
    assert all(f"{number:.6f}" in page for number in (whole, part, slope))


def followed(case: dict[str, Any], dtype: torch.dtype) -> list[list[float]]:
    now, found = [torch.tensor(case["start"], dtype=dtype)], []
    for weights in case["weights"]:
        follow(now, [torch.tensor(weights, dtype=dtype)], case["decay"])
        found.append(now[0].tolist())
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_moving_average(dtype: torch.dtype) -> None:
    for case in golden.cases("average"):
        expected = np.array(case["averages"])
        assert np.abs(np.array(followed(case, dtype)) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


def test_a_wrong_operator_of_the_moving_average_is_found() -> None:
    [case, *_] = golden.cases("average")
    ours = np.array(followed(case, torch.float64))
    wrong = list(mutants(golden.average, OPERATORS))
    assert len(wrong) >= 4
    for line, mutant in wrong:
        found = np.array(mutant(case["decay"], np.array(case["start"]), np.array(case["weights"])))
        assert np.abs(found - ours).max() > 1e-3, line
