"""Units of rows that a loss compares, such as the two sides of a pair. Each unit stays in one bounded micro-batch."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate, pairwise

from sparring.batch.packing import SMALLEST_PIECE, lanes, pack
from sparring.batch.prefixes import walk
from sparring.types import Sample

RowUnit = list[Sample]
"""Rows that have to stay in one micro-batch."""


def units(rows: Sequence[Sample], paired: Set[str]) -> list[RowUnit]:
    """Group rows with weight in a term of `paired` by their `group`; every other row is a unit of its own. Units are in
    the order of their first rows."""
    by_key: dict[tuple[str, str | int], RowUnit] = {}
    for number, row in enumerate(rows):
        key = ("pair", row.group) if paired & row.weights.keys() else ("row", number)
        by_key.setdefault(key, []).append(row)
    return list(by_key.values())


def pack_units(rows: Sequence[Sample], token_budget: int, paired: Set[str]) -> list[list[Sample]]:
    """Pack rows like `pack`, without splitting a unit.

    Units of several rows are placed first-fit, and a prefix that two units share counts twice. So a micro-batch may be
    smaller than necessary, but exceeds `token_budget` only if a single unit does.
    """
    all_units = units(rows, paired)
    if len(all_units) == len(rows):
        return pack(rows, token_budget)
    bins: list[list[Sample]] = []
    room: list[int] = []
    for unit in all_units:
        size = _size(unit)
        index = next((b for b, space in enumerate(room) if size <= space), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[index] += unit
        room[index] -= size
    return bins


def cut_units(rows: Sequence[Sample], count: int, paired: Set[str], context: float = 0.0) -> list[list[Sample]]:
    """Cut rows into lanes like `lanes`, without splitting a unit."""
    all_units = units(rows, paired)
    if len(all_units) == len(rows):
        return lanes(rows, count, context)
    before = list(accumulate((_size(unit) for unit in all_units), initial=0))
    count = max(1, min(count, before[-1] // SMALLEST_PIECE, len(all_units)))
    cuts = [0]
    for piece in range(1, count):
        places = range(cuts[-1] + 1, len(all_units) - count + piece + 1)
        cuts.append(min(places, key=lambda cut: abs(before[cut] - before[-1] * piece / count)))
    return [[row for unit in all_units[a:b] for row in unit] for a, b in pairwise([*cuts, len(all_units)])]


def _size(unit: RowUnit) -> int:
    """Count the tokens of a unit's distinct prefixes."""
    order, shared = walk([row.tokens for row in unit])
    return sum(len(unit[index].tokens) - common for index, common in zip(order, shared, strict=True))
