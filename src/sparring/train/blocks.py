"""Blocks: parameters cut at fixed places, so that neither a shard nor the norm of a gradient depends on the number of
ranks.

Shapes: n elements of one parameter, B blocks of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

BLOCK = 4096
"""Elements of a block; the last block of a parameter may be shorter. A run's bits depend on it, so it never changes."""
AT_ONCE = 256
"""Blocks whose squares are computed at once, which bounds the memory."""
FEW = 1 << 14
"""Number of elements at or below which numpy adds the halves, because an operation of torch costs more than the
addition."""

Stretch = tuple[int, int]
"""Range [begin, end) of a parameter's elements."""


def stretches(sizes: Mapping[str, int], count: int) -> list[dict[str, Stretch]]:
    """Cut parameters, given by their numbers of elements, into `count` shards of nearly equal size. A shard ends at the
    end of a block. Return, for each shard, the range of elements that it has of each of its parameters."""
    total, before = sum(sizes.values()), 0
    shards: list[dict[str, Stretch]] = [{} for _ in range(count)]
    for name, size in sizes.items():
        for begin in range(0, size, BLOCK):
            shard = shards[(before + begin) * count // total]
            shard[name] = (shard.get(name, (begin, begin))[0], min(begin + BLOCK, size))
        before += size
    return shards


@torch.no_grad()
def block_squares(*tensors: torch.Tensor) -> list[float]:
    """Return the sum of squares of each block of contiguous tensors, block by block in their order, in float64.

    The halves of a block are added element by element until one element is left, so a sum depends on the elements of
    its block alone. The square of a float32 number is exact in float64. Small tensors are computed together, with their
    blocks padded to one width by zeros, which change no bit.
    """
    sums, pieces, rows = list[float](), list[torch.Tensor](), 0
    for piece in (piece for values in tensors for piece in values.reshape(-1).split(BLOCK * AT_ONCE)):
        count = -(-len(piece) // BLOCK)
        if rows + count > AT_ONCE:
            sums += _sums(pieces, rows)
            pieces, rows = [], 0
        pieces.append(piece)
        rows += count
    return sums + _sums(pieces, rows) if pieces else sums


def _sums(pieces: Sequence[torch.Tensor], rows: int) -> list[float]:
    largest = max(map(len, pieces))
    width = min(BLOCK, 1 << max(0, largest - 1).bit_length())
    halves, begin = torch.zeros(rows * width, dtype=torch.float64, device=pieces[0].device), 0
    for piece in pieces:
        halves[begin : begin + len(piece)] = piece
        begin += -(-len(piece) // BLOCK) * width
    halves = halves.mul_(halves).view(rows, width)
    while halves.numel() > FEW and halves.shape[1] > 1:
        halves = torch.add(*halves.chunk(2, 1))
    few = halves.cpu().numpy()
    while (width := few.shape[1] // 2) > 0:
        few = few[:, :width] + few[:, width:]
    sums: list[float] = few[:, 0].tolist()
    return sums


def buckets(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide items of these sizes into consecutive ranges [first, end). The sizes in a range sum to at most `most`,
    unless a single item is larger."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > most:
            yield first, index
            first, total = index, 0
        total += size
    if sizes:
        yield first, len(sizes)


def norm_of(squares: Iterable[float]) -> float:
    """Return the norm of all blocks from their sums of squares. These are added with one rounding (`math.fsum`), so
    their order does not matter."""
    return math.sqrt(math.fsum(squares))
