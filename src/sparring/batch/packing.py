"""Packing: rows into micro-batches of bounded size, and a micro-batch into parts of equal cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from sparring.batch.prefixes import walk
from sparring.types import Sample

SMALLEST_PIECE = 256
"""Smallest number of tokens for which a separate part pays off."""
MOST_EXTRA = 0.03
"""Maximum share of tokens that a split into parallel parts may duplicate; above it, no split is made."""
UNITS_PER_PART = 4
"""Subtrees that cost more than 1 / `UNITS_PER_PART` of a part are divided into branches, which are placed one by
one."""

Subtree = tuple[int, int]
"""Range [first, last) of rows in the walk: one row, or all rows with some prefix."""


def pack(rows: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """Pack rows into micro-batches of at most `token_budget` tokens; a prefix that rows share counts once.

    Two orders are tried. The one with fewer micro-batches is taken; at equal numbers, the one with fewer computed
    tokens. The first goes row by row in lexicographic order, which splits a group only when a micro-batch is full. The
    second places subtrees of the prefix tree that fit the budget, the largest first; without shared prefixes this is
    best-fit decreasing, with at most 11/9 of the optimum + 4 micro-batches (Johnson, Demers, Ullman, Garey and Graham
    1974). Each row or subtree goes where it adds the fewest tokens, ties to the fullest micro-batch. A row longer than
    the budget gets its own micro-batch. So at most one micro-batch ends half empty.

    The result depends only on the rows' order and tokens. Rows keep their order within a micro-batch, and micro-batches
    are ordered by their first row.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    tree = _Tree(rows)
    if tree.cost <= token_budget:
        return [list(rows)] if rows else []
    orders = [tree.singles(), tree.largest_first(tree.units(token_budget))]
    parts = min((_place(tree, order, token_budget) for order in orders), key=lambda parts: (len(parts), _total(parts)))
    return tree.samples(parts)


def lanes(rows: Sequence[Sample], count: int, context: float = 0.0) -> list[list[Sample]]:
    """Cut one micro-batch into `count` parts of nearly equal cost, which one processor computes in parallel.

    Two ways are tried. The one whose most expensive part costs less is taken; at equal costs, the one with the lower
    total. The first cuts the rows in lexicographic order into stretches, which splits few groups. The second gives out
    subtrees, the most expensive first, each to the part that is then cheapest (Graham 1969: at most 4/3 of the optimum
    if rows share nothing). The micro-batch stays whole if a part would have fewer than `SMALLEST_PIECE` tokens, or if
    shared prefixes, which each part computes for itself, would raise the total by more than `MOST_EXTRA`.

    The result depends only on the rows' order and tokens, and is ordered as in `pack`. `context` is the number of
    earlier positions at which attention costs a token as much as everything else; 0 ignores the cost of attention.
    """
    tree = _Tree(rows, context)
    parts = _deal_out(tree, count)
    if min(part.cost for part in parts) < SMALLEST_PIECE or _total(parts) > (1 + MOST_EXTRA) * tree.cost:
        return [list(rows)]
    return tree.samples(parts)


class _Part:
    """Part of the rows: their indices in the walk, ascending, and their total cost."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.cost = 0.0


class _Tree:
    """Rows in lexicographic order, a walk through their prefix tree, with the costs of subtrees.

    Each distinct prefix costs 1 plus the attention of its last token: the first n positions of a row cost n + n^2 / (2
    context).
    """

    def __init__(self, rows: Sequence[Sample], context: float = 0.0) -> None:
        self._rows = rows
        self._order, self._shared = walk([row.tokens for row in rows])
        self._lengths = [len(rows[index].tokens) for index in self._order]
        self._of: Callable[[int], float] = (lambda n: n + n * n / (2 * context)) if context else float
        added = [self._of(n) - self._of(shared) for n, shared in zip(self._lengths, self._shared, strict=True)]
        self._before = list(accumulate(added, initial=0.0))
        self.cost = self._before[-1]

    def singles(self) -> list[Subtree]:
        return [(row, row + 1) for row in range(len(self._order))]

    def units(self, most: float) -> list[Subtree]:
        """List the largest subtrees that cost at most `most`; a single row may cost more."""
        subtrees, pending = [], [(0, len(self._order))] if self._order else []
        while pending:
            first, last = pending.pop()
            if last - first == 1 or self._cost((first, last)) <= most:
                subtrees.append((first, last))
                continue
            least = min(self._shared[first + 1 : last])
            cuts = [row for row in range(first + 1, last) if self._shared[row] == least]
            pending += pairwise([first, *cuts, last])
        return subtrees

    def largest_first(self, units: list[Subtree]) -> list[Subtree]:
        return sorted(units, key=lambda unit: (-self._cost(unit), unit))

    def added(self, part: _Part, unit: Subtree) -> float:
        """Return the cost that `unit` adds to `part`, without the longest prefix that `part` already contains.

        A row outside a subtree shares the same prefix with all rows of the subtree. So it suffices to compare the rows
        of `part` just before and just after the subtree.
        """
        first, last = unit
        at, shared = bisect_left(part.rows, first), 0
        if at and self._shared[first]:
            shared = min(self._shared[part.rows[at - 1] + 1 : first + 1])
        if at < len(part.rows) and self._shared[last]:
            shared = max(shared, min(self._shared[last : part.rows[at] + 1]))
        return self._cost(unit) - self._of(shared)

    def put(self, part: _Part, unit: Subtree) -> None:
        part.cost += self.added(part, unit)
        for row in range(*unit):
            insort(part.rows, row)

    def stretches(self, parts: int) -> list[_Part]:
        """Cut the walk into `parts` stretches of nearly equal cost, preferably where consecutive rows share little."""
        count = min(parts, len(self._order))
        cuts = [0]
        for piece in range(1, count):
            goal = self.cost * piece / count
            places = range(cuts[-1] + 1, len(self._order) - count + piece + 1)
            cuts.append(
                min(places, key=lambda row: abs(self._before[row] - goal) - (self._before[row + 1] - self._before[row]))
            )
        stretches = [_Part() for _ in range(parts)]
        for part, stretch in zip(stretches, pairwise([*cuts, len(self._order)]), strict=False):
            if stretch[0] < stretch[1]:
                part.rows, part.cost = list(range(*stretch)), self._cost(stretch)
        return stretches

    def samples(self, parts: Iterable[_Part]) -> list[list[Sample]]:
        """Return the rows of each non-empty part, in the order that `pack` promises."""
        members = sorted(sorted(self._order[row] for row in part.rows) for part in parts if part.rows)
        return [[self._rows[index] for index in indices] for indices in members]

    def _cost(self, unit: Subtree) -> float:
        return self._before[unit[1]] - self._before[unit[0]] + self._of(self._shared[unit[0]])


def _place(tree: _Tree, units: Iterable[Subtree], budget: int) -> list[_Part]:
    """Place each unit in the part to which it adds least; for ties, in the part with the least room. Open a new part
    for a unit that fits nowhere."""
    parts: list[_Part] = []
    for unit in units:
        costs = [(tree.added(part, unit), -part.cost, number) for number, part in enumerate(parts)]
        fitting = [(added, minus, number) for added, minus, number in costs if added - minus <= budget]
        if not fitting:
            parts.append(_Part())
        tree.put(parts[min(fitting)[2] if fitting else -1], unit)
    return parts


def _deal_out(tree: _Tree, count: int) -> list[_Part]:
    """Divide the rows among `count` parts, some possibly empty, in the cheaper of the two ways of `lanes`."""
    dealt = [_Part() for _ in range(count)]
    for unit in tree.largest_first(tree.units(tree.cost / (count * UNITS_PER_PART))):
        tree.put(min(dealt, key=lambda part: part.cost + tree.added(part, unit)), unit)
    return min((tree.stretches(count), dealt), key=lambda parts: (max(part.cost for part in parts), _total(parts)))


def _total(parts: Iterable[_Part]) -> float:
    return sum(part.cost for part in parts)
