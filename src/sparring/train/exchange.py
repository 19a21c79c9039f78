"""Exchange of gradients between ranks: the rank whose shard has a range of elements adds all ranks' gradients of these
elements, in the order of the ranks.

So the sum of gradients has the same bits as in one process, whatever the number of ranks. A parameter without a
gradient in a part is left out of the sum, as in one process: adding a zero would turn -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sparring.train.blocks import Stretch, buckets
from sparring.train.optimiser import Optimiser
from sparring.train.ranks import Ranks

BUCKET = 64 << 20
"""Bytes of gradients that a rank sends at a time, which bounds the memory of the copy."""
ALIGNMENT = 8
"""Alignment of a gradient in a sent message, in bytes."""


class GradientExchange:
    """Exchange of gradients, which are added to the shards of an optimiser. A rank copies and sends at most `at_once`
    bytes at a time; a larger gradient is sent alone."""

    def __init__(self, optimiser: Optimiser, ranks: Ranks, at_once: int = BUCKET) -> None:
        self._optimiser, self._ranks, self._at_once = optimiser, ranks, at_once
        self._parameters = dict(zip(optimiser.names, optimiser.parameters, strict=True))

    def run(self, names: Sequence[str], gradients: dict[str, torch.Tensor], present: Sequence[bytes]) -> None:
        """Send to each rank the elements of gradients in its shard, and add the received gradients in the order of the
        ranks.

        Args:
            names: parameters, the same in all ranks.
            gradients: gradients of this rank by name, without the parameters that have none; emptied by this call.
            present: `presence` of the gradients of `names`, by rank.
        """
        for first, end in buckets([self._parameters[name].nbytes for name in names], self._at_once):
            self._send(names[first:end], gradients, [of_rank[first:end] for of_rank in present])

    def _send(self, names: Sequence[str], gradients: dict[str, torch.Tensor], present: Sequence[bytes]) -> None:
        own = self._optimiser.ranges
        here = [name for name in names if name in gradients]
        sent = [[(gradients[name], shard[name]) for name in here if name in shard] for shard in self._optimiser.shards]
        lengths = [sum(_padded((b - a) * gradient.element_size()) for gradient, (a, b) in each) for each in sent]
        given = _packed([stretch for each in sent for stretch in each], sum(lengths))
        widths = [
            {
                name: _padded((own[name][1] - own[name][0]) * self._parameters[name].element_size())
                for name, is_there in zip(names, of_rank, strict=True)
                if name in own and is_there
            }
            for of_rank in present
        ]
        received = self._ranks.exchange(given, lengths, [sum(each.values()) for each in widths])
        del sent, given
        for name in here:
            del gradients[name]
        self._add(received, widths)

    def _add(self, received: Sequence[torch.Tensor], widths: Sequence[Mapping[str, int]]) -> None:
        """Add received gradients rank by rank, so part by part: this order of addition makes the bits of a run."""
        for data, of_rank in zip(received, widths, strict=True):
            for name, piece in zip(of_rank, data.split(list(of_rank.values())), strict=True):
                begin, end = self._optimiser.ranges[name]
                dtype = self._parameters[name].dtype
                self._optimiser.add_one(name, piece[: (end - begin) * dtype.itemsize].view(dtype))


def presence(names: Sequence[str], gradients: Mapping[str, torch.Tensor]) -> bytes:
    """Return one byte for each parameter: 1 if it has a gradient, else 0."""
    return bytes(name in gradients for name in names)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _packed(stretches: Sequence[tuple[torch.Tensor, Stretch]], size: int) -> torch.Tensor:
    """Return the bytes of these ranges of gradients in one tensor of `size` bytes, each range padded to `ALIGNMENT`."""
    data, at = torch.empty(size, dtype=torch.uint8), 0
    for gradient, (begin, end) in stretches:
        length = (end - begin) * gradient.element_size()
        data[at : at + length].view(gradient.dtype).copy_(gradient.detach().reshape(-1)[begin:end])
        at += _padded(length)
    return data
