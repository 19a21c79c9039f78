"""Parts among ranks: rank r of R computes the parts r, r + R, .... In each round of R parts, the rank that has a shard
adds the gradients of that shard in the order of the parts (`exchange`)."""

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

Round = Callable[[Sequence[Sample] | None, Compute], list[PlainMeasures]]
"""Function that computes this rank's part of a round, adds the gradients of all ranks to the optimiser, and returns the
measures of all ranks. The rows are None in a rank without a part."""


class Dealt:
    """Computation of parts by several ranks: in each round, every rank computes one part. Implements `Parts`."""

    lanes = LANES

    def __init__(self, optimiser: Optimiser, ranks: Ranks, compute_round: Round) -> None:
        self._optimiser, self._ranks, self._round = optimiser, ranks, compute_round

    def run(self, micro_batches: Sequence[Sequence[Sequence[Sample]]], compute: Compute) -> Iterator[PlainMeasures]:
        parts, complete = [part for parts in micro_batches for part in parts], False
        try:
            for first in range(0, len(parts), self._ranks.count):
                own = first + self._ranks.rank
                yield from self._round(parts[own] if own < len(parts) else None, compute)
            complete = True
        finally:
            if not complete:  # the set of gradients that was added is arbitrary
                self._optimiser.discard()

    def close(self) -> None:
        """Do nothing: it has no threads."""


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a rank on its part of a round: which parameters have a gradient, and the part's measures. Both are
    empty for a part without tokens to train."""

    present: bytes = b""
    measures: PlainMeasures | None = None


def exchanged(optimiser: Optimiser, ranks: Ranks, at_once: int = BUCKET) -> Round:
    """Return a `Round` that exchanges gradients after each part's backward pass; `at_once` as in `GradientExchange`."""
    exchange, names = GradientExchange(optimiser, ranks, at_once), optimiser.names

    def compute_round(rows: Sequence[Sample] | None, compute: Compute) -> list[PlainMeasures]:
        gradients = dict[str, torch.Tensor]()

        def own() -> bytes:
            part = None if rows is None else compute(rows)
            if part is None:
                return msgspec.msgpack.encode(_Report())
            found = torch.autograd.grad(part.loss, optimiser.parameters, allow_unused=True)
            gradients.update((name, one) for name, one in zip(names, found, strict=True) if one is not None)
            return msgspec.msgpack.encode(_Report(present=presence(names, gradients), measures=part.measures()))

        reports = [msgspec.msgpack.decode(data, type=_Report) for data in agree(ranks, own)]
        exchange.run(names, gradients, [each.present or bytes(len(names)) for each in reports])
        return [each.measures for each in reports if each.measures is not None]

    return compute_round
