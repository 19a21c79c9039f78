"""Parts among ranks: rank r of R computes the parts r, r + R, ..., and the owner of a shard adds the gradients of each
round in the order of the parts (`exchange`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from sparring.train.exchange import BUCKET, GradientExchange, presence
from sparring.train.measure import PlainMeasures
from sparring.train.optimiser import Optimiser
from sparring.train.parts import LANES, Compute
from sparring.train.ranks import Ranks, agree
from sparring.types import Sample


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a rank on its part of a round: which parameters have a gradient, and the part's measures. Both are
    empty for a part without tokens to train."""

    present: bytes = b""
    measures: PlainMeasures | None = None


class Dealt:
    """Parts that are dealt to ranks; `at_once` as in `GradientExchange`. Implements `Parts`."""

    lanes = LANES

    def __init__(self, optimiser: Optimiser, ranks: Ranks, at_once: int = BUCKET) -> None:
        self._optimiser, self._ranks = optimiser, ranks
        self._exchange = GradientExchange(optimiser, ranks, at_once)

    def run(self, micro_batches: Sequence[Sequence[Sequence[Sample]]], compute: Compute) -> Iterator[PlainMeasures]:
        return in_rounds(micro_batches, self._ranks, self._optimiser, lambda rows: self._round(rows, compute))

    def close(self) -> None:
        """Do nothing: it has no threads."""

    def _round(self, rows: Sequence[Sample] | None, compute: Compute) -> list[PlainMeasures]:
        """Compute this rank's part, and exchange its gradients with the other ranks'."""
        names, gradients = self._optimiser.names, dict[str, torch.Tensor]()

        def own() -> bytes:
            part = None if rows is None else compute(rows)
            if part is None:
                return msgspec.msgpack.encode(_Report())
            found = torch.autograd.grad(part.loss, self._optimiser.parameters, allow_unused=True)
            gradients.update((name, one) for name, one in zip(names, found, strict=True) if one is not None)
            report = _Report(present=presence(names, gradients), measures=part.measures())
            return msgspec.msgpack.encode(report)

        reports = [msgspec.msgpack.decode(data, type=_Report) for data in agree(self._ranks, own)]
        self._exchange.run(names, gradients, [each.present or bytes(len(names)) for each in reports])
        return [each.measures for each in reports if each.measures is not None]


def in_rounds(
    micro_batches: Sequence[Sequence[Sequence[Sample]]],
    ranks: Ranks,
    optimiser: Optimiser,
    compute: Callable[[Sequence[Sample] | None], list[PlainMeasures]],
) -> Iterator[PlainMeasures]:
    """Compute parts in rounds, one part of each round in each rank; yield their measures in the order of the parts.

    Args:
        compute: function that computes this rank's part of a round, None in a rank without one, adds the gradients of
            all ranks to the optimiser, and returns the measures of all ranks.
    """
    parts, complete = [part for parts in micro_batches for part in parts], False
    try:
        for first in range(0, len(parts), ranks.count):
            own = first + ranks.rank
            yield from compute(parts[own] if own < len(parts) else None)
        complete = True
    finally:
        if not complete:  # the set of gradients that was added is arbitrary
            optimiser.discard()
