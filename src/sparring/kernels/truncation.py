"""Kept sets of truncated sampling, exchanged between kernels, engine and trainer: masks over the vocabulary, or
ascending ids.

Shapes: N rows, V vocabulary, W = ceil(V / 64) words of a mask, K kept ids in all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar, cast

import numpy as np
import torch

Columns = TypeVar("Columns", bound=tuple[torch.Tensor, ...])

KeptRows = tuple[torch.Tensor, torch.Tensor]
"""offsets [N + 1] int64 and ids [K] int32: row n is limited to ids[offsets[n]:offsets[n + 1]], ascending; a row with no
ids is not limited."""


def no_masks(rows: int, vocabulary: int) -> np.ndarray:
    """Allocate zero masks [N, W] uint64, in which the kernels set bits."""
    return np.zeros((rows, -(-vocabulary // 64)), np.uint64)


def ids_of(masks: np.ndarray) -> list[bytes]:
    """Return the ids of each row of masks [N, W] in the form of `types.KeptSets`; empty for a row without bits."""
    rows, words = masks.nonzero()
    bits = np.unpackbits(masks[rows, words].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    at, bit = bits.nonzero()
    ids = (words[at] * 64 + bit).astype("<i4").tobytes()
    ends = 4 * np.bincount(rows[at], minlength=len(masks)).cumsum()
    return [ids[begin:end] for begin, end in pairwise([0, *ends.tolist()])]


def select_rows(values: Columns | None, rows: torch.Tensor) -> Columns | None:
    """Select the rows where `rows` [N] is true from offsets [N + 1] and columns [K], such as kept sets."""
    if values is None:
        return None
    offsets, *columns = values
    counts = offsets.diff()
    selected = torch.repeat_interleave(rows, counts)
    ends = torch.cat((offsets[:1], counts[rows].cumsum(0)))
    return cast("Columns", (ends, *(column[selected] for column in columns)))


def split_rows(values: Columns | None, rows: int, size: int) -> list[Columns | None]:
    """Split offsets [N + 1] and columns [K], such as kept sets, into chunks of `size` rows; the last may be smaller."""
    bounds = [*range(0, rows, size), rows] if rows else [0, 0]
    if values is None:
        return [None] * (len(bounds) - 1)
    offsets, *columns = values
    parts = [offsets[begin : end + 1] for begin, end in pairwise(bounds)]
    chunks = [(part - part[0], *(column[int(part[0]) : int(part[-1])] for column in columns)) for part in parts]
    return cast("list[Columns | None]", chunks)
