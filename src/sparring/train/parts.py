"""Parts of a batch: the units whose gradients are added one after the other, in one order for every layout.

A batch is packed into micro-batches, and each is cut into parts. Neither depends on the number of threads or ranks.
The gradient of a batch is the sum of its parts' gradients in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from sparring.batch.tensors import MicroBatch
from sparring.protocols import LossResult
from sparring.train.measure import Measures, PlainMeasures
from sparring.types import Sample

LANES = 2
"""Number of parts of a micro-batch on a CPU. They are computed in parallel, so that one part uses the threads that the
other part leaves idle between parallel regions. The number is the same on every machine, because the division of rows
decides the last bits of a gradient."""


class Part(NamedTuple):
    """Part before its backward pass: its loss, with a graph, and a function that returns its measures."""

    loss: torch.Tensor
    measures: Callable[[], PlainMeasures]


Compute = Callable[[Sequence[Sample]], Part | None]
"""Function that computes the losses of rows; it returns None if the rows have no token to train."""


class Parts(Protocol):
    """Computation of a batch's parts. Each micro-batch is cut into `lanes` parts, if it is large enough."""

    lanes: int

    def run(self, micro_batches: Sequence[Sequence[Sequence[Sample]]], compute: Compute) -> Iterator[PlainMeasures]:
        """Compute all parts of each micro-batch and add their gradients to the optimiser, in the order of the parts;
        yield the measures of each part that has tokens to train. After an error the optimiser has no gradients."""
        ...

    def close(self) -> None:
        """End the threads that compute parts."""
        ...


def measured(
    measures: Measures, micro: MicroBatch, logprobs: torch.Tensor | None, results: Mapping[str, LossResult]
) -> PlainMeasures:
    """Add the tokens and losses of one part to `measures`, and return the measures as plain data."""
    measures.add_tokens(micro, logprobs)
    for term, result in results.items():
        measures.add_loss(term, result)
    return measures.plain()
