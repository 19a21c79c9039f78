"""Whole rows into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from sparring.batch.prefixes import walk
from sparring.types import Sample


SMALLEST_PIECE = 256
"""Tokens below which a piece costs more than it gains."""


def pack(rows: Sequence[Sample], token_budget: int, lanes: int = 1) -> list[list[Sample]]:
    """At most `token_budget` distinct prefixes' tokens per micro-batch: what several rows begin with counts once.

    Rows are placed in lexicographic order, each into the micro-batch with room that has the longest prefix of it, the first
    of equals; a row longer than the budget gets one of its own. So at most one micro-batch ends half empty, and rows that
    share nothing are packed first-fit: at most 1.7 times the fewest possible (Dosa and Sgall 2013). With several `lanes`, as
    many micro-batches are computed side by side: each is then cut into so many of nearly equal size, where little is shared.

    A function of the rows' order and tokens alone. Rows keep their given order inside a micro-batch, and micro-batches are
    ordered by their first row.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    bins: list[list[int]] = []
    added: list[list[int]] = []  # per member, the tokens that it adds to those before it
    room: list[int] = []
    known: list[int] = []  # per micro-batch, how long a prefix of the row at hand it has: with its last row it shares most
    for index, shared in zip(*walk([row.tokens for row in rows]), strict=True):
        length = len(rows[index].tokens)
        known = [min(prefix, shared) for prefix in known]
        fitting = [b for b, left in enumerate(room) if length - known[b] <= left]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            added.append([])
            room.append(token_budget)
            known.append(0)
        place = max(fitting, key=known.__getitem__)
        bins[place].append(index)
        added[place].append(length - known[place])
        room[place] -= length - known[place]
        known[place] = length
    pieces = [sorted(piece) for members, new in zip(bins, added, strict=True) for piece in _cut(members, new, lanes)]
    return [[rows[i] for i in piece] for piece in sorted(pieces)]


def _cut(members: list[int], added: list[int], lanes: int) -> list[list[int]]:
    """A micro-batch in up to `lanes` pieces. A row that adds many tokens shares few with the one before it: a good place."""
    total = sum(added)
    count = min(lanes, total // SMALLEST_PIECE, len(members))
    if count < 2:
        return [members]
    before = list(accumulate(added, initial=0))
    cuts = [0]
    for piece in range(1, count):
        goal = total * piece / count
        places = range(cuts[-1] + 1, len(members) - count + piece + 1)
        cuts.append(min(places, key=lambda place: abs(before[place] - goal) - added[place]))
    return [members[a:b] for a, b in pairwise([*cuts, len(members)])]
