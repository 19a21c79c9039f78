"""Whole rows into micro-batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.types import Sample


def pack(rows: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """First-fit decreasing: at most `token_budget` tokens per micro-batch; a longer row gets one of its own.

    A function of the rows' order and lengths alone. Rows keep their given order inside a micro-batch, and micro-batches are
    ordered by their first row. First-fit decreasing needs at most 11/9 of the fewest possible bins, plus 6/9 (Dosa 2007).
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: (-len(rows[i].tokens), i)):
        length = len(rows[index].tokens)
        place = next((b for b, left in enumerate(room) if length <= left), None)
        if place is None:
            bins.append([index])
            room.append(token_budget - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return [[rows[i] for i in members] for members in sorted(sorted(b) for b in bins)]
