"""First pass for losses that depend on all tokens of an optimiser step.

Shapes: M weighted tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import compress

import torch

from sparring.batch.tensors import micro_batch
from sparring.protocols import Loss
from sparring.types import Sample

Forward = Callable[[Sequence[Sample], Set[str]], Sequence[Mapping[str, tuple[float, ...]]]]


def surveyed(
    rows: Sequence[Sample], denominators: Mapping[str, float], losses: Sequence[Loss], forward: Forward
) -> Sequence[Sample]:
    """Annotate rows with the values that losses compute for each token from all tokens of the step. Where no loss
    `needs_survey`, the rows are returned as they are.

    The tokens are in the order of the rows, so the result depends neither on the token budget nor on the micro-batches.

    Args:
        rows: all rows of the optimiser step.
        denominators: of the batch.
        losses: of the trainer.
        forward: quantities of every weighted token, without gradients (`LocalTrainer._forward`).
    """
    asking = [loss for loss in losses if loss.term in denominators and needs_survey(loss, rows)]
    if not asking or not rows:
        return rows
    # the choice of tokens depends on the trained model alone, and a teacher costs a forward
    needs = sorted(set[str]().union(*(loss.needs.quantities for loss in asking)) - {"divergence"})
    values = forward(rows, set(needs))
    micro = micro_batch(rows, denominators, idle_tokens=True)
    weighted = [[any(weights) for weights in zip(*row.weights.values(), strict=True)] for row in rows]
    quantities = {
        name: torch.tensor([x for row, mask in zip(values, weighted, strict=True) for x in compress(row[name], mask)])
        for name in needs
    }
    columns = {
        name: iter(column.tolist()) for loss in asking for name, column in loss.survey(quantities, micro).items()
    }
    return [
        replace(row, annotations={**row.annotations, **{n: _spread(column, mask) for n, column in columns.items()}})
        for row, mask in zip(rows, weighted, strict=True)
    ]


def needs_survey(loss: Loss, rows: Sequence[Sample]) -> bool:
    """Return whether a loss has to see all tokens of the step at once: it says so, or it looks at whole sequences, and
    a trajectory has several of the rows, which micro-batches may part."""
    return loss.needs.survey or loss.needs.unit == "sequence" and len({row.trajectory for row in rows}) < len(rows)


def _spread(column: Iterator[float], mask: Sequence[bool]) -> tuple[float, ...]:
    """Take the next values of `column` where the mask is set, 0.0 elsewhere."""
    return tuple([next(column) if is_weighted else 0.0 for is_weighted in mask])
