"""Blocks: parameters cut at fixed places, so that neither a shard nor the norm of a gradient depends on the number of
ranks.

Shapes: n elements of one parameter, B blocks of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

BLOCK = 4096
"""Elements of a block; the last block of a parameter may be shorter. A run's bits depend on it, so it never changes."""
AT_ONCE = 256
"""Blocks whose squares are computed at once, which bounds the memory."""

Stretch = tuple[int, int]
"""Range [begin, end) of a parameter's elements."""


def stretches(sizes: Mapping[str, int], count: int) -> list[dict[str, Stretch]]:
    """Cut parameters into `count` shards of nearly equal size, which end at the ends of blocks.

    Args:
        sizes: number of elements of each parameter, in the order of the parameters.

    Returns:
        For each shard, the stretch of each parameter of which it has elements.
    """
    total, before = sum(sizes.values()), 0
    shards: list[dict[str, Stretch]] = [{} for _ in range(count)]
    for name, size in sizes.items():
        for begin in range(0, size, BLOCK):
            shard = shards[(before + begin) * count // total]
            shard[name] = (shard.get(name, (begin, begin))[0], min(begin + BLOCK, size))
        before += size
    return shards


@torch.no_grad()
def block_squares(values: torch.Tensor) -> list[float]:
    """Return the sum of squares of each block of a contiguous tensor of n elements, B numbers in float64.

    The halves of a block are added element by element until one element is left, so a sum depends on the elements of
    its block alone. The square of a float32 number is exact in float64.
    """
    flat, sums = values.reshape(-1), list[float]()
    for begin in range(0, len(flat), BLOCK * AT_ONCE):
        squares = flat[begin : begin + BLOCK * AT_ONCE].double()
        squares *= squares
        rows = -(-len(squares) // BLOCK)
        halves = torch.nn.functional.pad(squares, (0, rows * BLOCK - len(squares))).view(rows, BLOCK)
        while (width := halves.shape[1] // 2) > 0:
            halves = halves[:, :width] + halves[:, width:]
        sums += halves[:, 0].tolist()
    return sums


def norm_of(squares: Iterable[float]) -> float:
    """Return the norm of all blocks from their sums of squares. The sum over blocks is rounded once (`math.fsum`), so
    it does not depend on their order."""
    return math.sqrt(math.fsum(squares))
