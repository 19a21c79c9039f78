"""Whole rows into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from sparring.batch.prefixes import walk
from sparring.types import Sample

SMALLEST_PIECE = 256
"""Tokens below which a piece costs more than it gains."""


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


def cut(rows: Sequence[Sample], lanes: int) -> list[list[Sample]]:
    """One micro-batch as up to `lanes` of nearly equal size, to be computed side by side.

    A row that adds many tokens to those before it in lexicographic order shares few with them: a good place. What is shared all
    the same is computed in both pieces. Order and dependence as in `pack`.
    """
    if lanes == 1:
        return [list(rows)]
    order, shared = walk([row.tokens for row in rows])
    added = [len(rows[index].tokens) - known for index, known in zip(order, shared, strict=True)]
    before = list(accumulate(added, initial=0))
    count = max(1, min(lanes, before[-1] // SMALLEST_PIECE, len(rows)))
    cuts = [0]
    for piece in range(1, count):
        goal = before[-1] * piece / count
        places = range(cuts[-1] + 1, len(rows) - count + piece + 1)
        cuts.append(min(places, key=lambda place: abs(before[place] - goal) - added[place]))
    pieces = [sorted(order[a:b]) for a, b in pairwise([*cuts, len(rows)])]
    return [[rows[i] for i in piece] for piece in sorted(pieces)]
