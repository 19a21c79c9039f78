"""Survey: the first pass for losses that depend on all tokens of an optimiser step.

Shapes: M weighted tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import compress
from typing import TypeGuard

import torch

from sparring.batch.tensors import micro_batch
from sparring.protocols import Loss, SurveyingLoss
from sparring.types import Sample

Forward = Callable[[Sequence[Sample], Set[str]], Sequence[Mapping[str, tuple[float, ...]]]]


def surveyed(
    rows: Sequence[Sample], denominators: Mapping[str, float], losses: Sequence[Loss], forward: Forward
) -> Sequence[Sample]:
    """Annotate rows with per-token values that losses compute from all tokens of the step.

    Returns the rows unchanged if no loss `needs_survey`. The tokens are in the order of the rows, so the result does
    not depend on the token budget or on the micro-batches.

    `forward` computes quantities of every weighted token, without gradients.
    """
    surveying = [loss for loss in losses if loss.term in denominators and needs_survey(loss, rows)]
    if not surveying or not rows:
        return rows
    # surveys read the trained model only; a divergence would cost the teacher's forward pass
    needs = sorted(set[str]().union(*(loss.needs.quantities for loss in surveying)) - {"divergence"})
    values = forward(rows, set(needs))
    micro = micro_batch(rows, denominators, idle_tokens=True)
    weighted = list(map(weighted_tokens, rows))
    quantities = {
        name: torch.tensor([x for row, mask in zip(values, weighted, strict=True) for x in compress(row[name], mask)])
        for name in needs
    }
    columns = {
        name: iter(column.tolist()) for loss in surveying for name, column in loss.survey(quantities, micro).items()
    }
    return [
        replace(row, annotations={**row.annotations, **{n: spread(column, mask) for n, column in columns.items()}})
        for row, mask in zip(rows, weighted, strict=True)
    ]


def needs_survey(loss: Loss, rows: Sequence[Sample]) -> TypeGuard[SurveyingLoss]:
    """Return whether a loss has to see all tokens of the step at once. So it is if the loss declares it. So it is too
    if the loss's unit is the sequence and a trajectory has several rows, which may be in different micro-batches."""
    return loss.needs.survey or loss.needs.unit == "sequence" and len({row.trajectory for row in rows}) < len(rows)


def weighted_tokens(row: Sample) -> list[bool]:
    """Return for each token of a row whether a loss term gives it weight."""
    return [any(weights) for weights in zip(*row.weights.values(), strict=True)] or [False] * len(row.tokens)


def spread(column: Iterator[float], mask: Sequence[bool]) -> tuple[float, ...]:
    """Return one value per position of the mask: the next value of `column` where the mask is True, else 0.0."""
    return tuple([next(column) if is_weighted else 0.0 for is_weighted in mask])
