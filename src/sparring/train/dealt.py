"""Parts among ranks: rank r of R computes the parts r, r + R, ..., and the owner of a shard adds the gradients of each
round in the order of the parts.

So the sum of gradients has the bits of one process, whatever the number of ranks. A parameter without a gradient in a
part is left out of the sum, as there: adding a zero would turn -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from sparring.train.blocks import Stretch
from sparring.train.measure import Measures, PlainMeasures
from sparring.train.optimiser import Optimiser
from sparring.train.parts import LANES, Compute
from sparring.train.ranks import Ranks, agree
from sparring.types import Sample

BUCKET = 64 << 20
"""Bytes of gradients that a rank sends at once, which bounds the memory of the copy."""
ALIGNMENT = 8
"""Alignment of a gradient in what is sent, in bytes."""

ABSENT, WHOLE, REORDERED = 0, 1, 2
"""Kinds of a parameter's gradient in a part: none, contiguous, and not contiguous."""


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a rank on its part of a round: the kind of each parameter's gradient, and the part's measures. Both are
    empty for a part without tokens to train."""

    kinds: bytes = b""
    measures: PlainMeasures | None = None


class Dealt:
    """Parts that are dealt to ranks. Implements `Parts`.

    Args:
        at_once: bytes of gradients that a rank copies and sends at once; a larger gradient goes alone.
    """

    lanes = LANES

    def __init__(self, optimiser: Optimiser, ranks: Ranks, at_once: int = BUCKET) -> None:
        self._optimiser, self._ranks, self._at_once = optimiser, ranks, at_once
        self._names = optimiser.names

    def run(self, micro_batches: Sequence[Sequence[Sequence[Sample]]], compute: Compute) -> Iterator[Measures]:
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

    def _round(self, rows: Sequence[Sample] | None, compute: Compute) -> list[Measures]:
        """Compute this rank's part, and exchange its gradients with the other ranks'.

        Raises:
            OtherRankFailed: the part of another rank failed.
        """
        gradients = list[torch.Tensor | None]()

        def own() -> bytes:
            part = None if rows is None else compute(rows)
            if part is None:
                return msgspec.msgpack.encode(_Report())
            gradients.extend(torch.autograd.grad(part.loss, self._optimiser.parameters, allow_unused=True))
            report = _Report(kinds=bytes(map(_kind, gradients)), measures=part.measures().plain())
            return msgspec.msgpack.encode(report)

        reports = [msgspec.msgpack.decode(data, type=_Report) for data in agree(self._ranks, own)]
        self._exchange(gradients, [each.kinds or bytes(len(self._names)) for each in reports])
        return [_measures(each.measures) for each in reports if each.measures is not None]

    def _exchange(self, gradients: list[torch.Tensor | None], kinds: Sequence[bytes]) -> None:
        """Send each gradient's stretches to their owners, and add what came, in the order of the ranks.

        Args:
            gradients: gradients of this rank's part, emptied on the way; none for an idle rank.
            kinds: kinds of all gradients, by rank.
        """
        shards, own = self._optimiser.shards, self._optimiser.ranges
        parameters = self._optimiser.parameters
        for first, end in _buckets([p.numel() * p.element_size() for p in parameters], self._at_once):
            names = self._names[first:end]
            sent = [
                [
                    (gradient, shard[name])
                    for name, gradient in zip(names, gradients[first:end], strict=False)  # an idle rank has none
                    if gradient is not None and name in shard
                ]
                for shard in shards
            ]
            lengths = [sum(_padded((b - a) * gradient.element_size()) for gradient, (a, b) in each) for each in sent]
            given = _packed([stretch for each in sent for stretch in each], sum(lengths))
            widths = [
                {
                    name: _padded((own[name][1] - own[name][0]) * parameters[index].element_size())
                    for index, name in enumerate(names, first)
                    if name in own and of_rank[index] != ABSENT
                }
                for of_rank in kinds
            ]
            received = self._ranks.exchange(given, lengths, [sum(each.values()) for each in widths])
            del sent, given
            if gradients:
                gradients[first:end] = [None] * (end - first)
            self._add(dict(zip(names, parameters[first:end], strict=True)), received, widths)
        for of_rank in kinds:
            for name, kind in zip(self._names, of_rank, strict=True):
                if kind == REORDERED:
                    self._optimiser.mark_reordered(name)

    def _add(
        self,
        parameters: dict[str, torch.nn.Parameter],
        received: Sequence[torch.Tensor],
        widths: Sequence[dict[str, int]],
    ) -> None:
        """Add received gradients. This is the order of addition that makes the bits of a run: rank by rank, so part by
        part."""
        for data, of_rank in zip(received, widths, strict=True):
            for name, piece in zip(of_rank, data.split(list(of_rank.values())), strict=True):
                begin, end = self._optimiser.ranges[name]
                dtype = parameters[name].dtype
                self._optimiser.add_one(name, piece[: (end - begin) * dtype.itemsize].view(dtype))


def _kind(gradient: torch.Tensor | None) -> int:
    return ABSENT if gradient is None else WHOLE if gradient.is_contiguous() else REORDERED


def _measures(plain: PlainMeasures) -> Measures:
    measures = Measures(0)
    measures.merge_plain(plain)
    return measures


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _packed(stretches: Sequence[tuple[torch.Tensor, Stretch]], size: int) -> torch.Tensor:
    """Return the bytes of stretches of gradients, each padded to `ALIGNMENT`, in one copy."""
    data, at = torch.empty(size, dtype=torch.uint8), 0
    for gradient, (begin, end) in stretches:
        length = (end - begin) * gradient.element_size()
        data[at : at + length].view(gradient.dtype).copy_(gradient.detach().reshape(-1)[begin:end])
        at += _padded(length)
    return data


def _buckets(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide parameters into ranges [first, end) of at most `most` bytes, or of one parameter."""
    first, size = 0, 0
    for index, each in enumerate(sizes):
        if index > first and size + each > most:
            yield first, index
            first, size = index, 0
        size += each
    if sizes:
        yield first, len(sizes)
