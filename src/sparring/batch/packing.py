"""Whole rows into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.batch.prefixes import walk
from sparring.types import Sample


def pack(rows: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """At most `token_budget` distinct prefixes' tokens per micro-batch: what several rows begin with counts once.

    Rows are placed in lexicographic order, each into the micro-batch with room that has the longest prefix of it, the first
    of equals; a row longer than the budget gets one of its own. So at most one micro-batch ends half empty, and rows that
    share nothing are packed first-fit: at most 1.7 times the fewest possible (Dosa and Sgall 2013).

    A function of the rows' order and tokens alone. Rows keep their given order inside a micro-batch, and micro-batches are
    ordered by their first row.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    bins: list[list[int]] = []
    room: list[int] = []
    known: list[int] = []  # per micro-batch, how long a prefix of the row at hand it has: with its last row it shares most
    for index, shared in zip(*walk([row.tokens for row in rows]), strict=True):
        length = len(rows[index].tokens)
        known = [min(prefix, shared) for prefix in known]
        fitting = [b for b, left in enumerate(room) if length - known[b] <= left]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            room.append(token_budget)
            known.append(0)
        place = max(fitting, key=known.__getitem__)
        bins[place].append(index)
        room[place] -= length - known[place]
        known[place] = length
    return [[rows[i] for i in members] for members in sorted(sorted(b) for b in bins)]
