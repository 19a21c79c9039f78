"""Whole rows into micro-batches of bounded size, and a micro-batch into parts of equal cost."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from sparring.batch.prefixes import walk
from sparring.types import Sample

SMALLEST_PIECE = 256
"""Tokens below which a piece costs more than it gains."""
MOST_EXTRA = 0.03
"""Largest share of tokens computed twice at which parts side by side still pay."""
UNITS_PER_PART = 4
"""A subtree larger than this share of a part is dealt out by its branches."""

Subtree = tuple[int, int]
"""Rows of the walk from the first to before the last: one row, or all that begin with some prefix."""


def pack(rows: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """Pack rows into micro-batches of at most `token_budget` distinct prefixes' tokens: a beginning that rows share
    counts once.

    Two orders are tried, and the one that makes fewer micro-batches, or else computes fewer tokens, is taken: row by
    row in lexicographic order, which parts a group only where a micro-batch is full; and subtrees that fit the budget,
    the largest first, so that rows which share nothing are packed best-fit decreasing: at most 11/9 of the fewest
    possible, and 4 (Johnson, Demers, Ullman, Garey and Graham 1974). Each goes where it adds least, and of these where
    it leaves least room; a row longer than the budget gets a micro-batch of its own. So at most one micro-batch ends
    half empty.

    A function of the rows' order and tokens alone. Rows keep their given order inside a micro-batch, and micro-batches
    are ordered by their first row.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, got {token_budget}")
    tree = _Tree(rows)
    if tree.cost <= token_budget:
        return [list(rows)] if rows else []
    orders = [tree.singles(), tree.largest_first(tree.units(token_budget))]
    parts = min((_placed(tree, order, token_budget) for order in orders), key=lambda parts: (len(parts), _total(parts)))
    return tree.samples(parts)


def lanes(rows: Sequence[Sample], count: int, context: float = 0.0) -> list[list[Sample]]:
    """Cut one micro-batch into `count` parts of nearly equal cost, to be computed side by side on one processor.

    Two ways are tried, and the one whose dearest part costs least, or else all of them together, is taken: the walk of
    the rows cut into stretches, which parts few groups; and subtrees dealt out, the dearest first, to the part that is
    cheapest with it (Graham 1969: at most 4/3 of the best where rows share nothing). The micro-batch stays whole where
    a part would have fewer than `SMALLEST_PIECE` tokens, or where the parts together cost more than `MOST_EXTRA` above
    the whole, because each computes the prefixes that they have in common.

    Order and dependence as in `pack`.

    Args:
        rows: one micro-batch.
        count: number of parts.
        context: over how many earlier positions a token must attend for that to cost as much as all else that is done
            with it; 0 where attention is not counted.
    """
    tree = _Tree(rows, context)
    parts = _shared_out(tree, count)
    if min(part.cost for part in parts) < SMALLEST_PIECE or _total(parts) > (1 + MOST_EXTRA) * tree.cost:
        return [list(rows)]
    return tree.samples(parts)


class _Part:
    """Rows of the walk in ascending order, and their cost together."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.cost = 0.0


class _Tree:
    """Rows as a walk through their tree of prefixes, and the cost of its parts.

    Each distinct prefix costs one, and for what its last token attends to: a row's first n positions n + n^2 / (2
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
        """List the rows one by one."""
        return [(row, row + 1) for row in range(len(self._order))]

    def units(self, most: float) -> list[Subtree]:
        """List the largest subtrees that cost no more than `most`; a single row whatever it costs."""
        subtrees, left = [], [(0, len(self._order))] if self._order else []
        while left:
            first, last = left.pop()
            if last - first == 1 or self._cost((first, last)) <= most:
                subtrees.append((first, last))
                continue
            least = min(self._shared[first + 1 : last])
            cuts = [row for row in range(first + 1, last) if self._shared[row] == least]
            left += pairwise([first, *cuts, last])
        return subtrees

    def largest_first(self, units: list[Subtree]) -> list[Subtree]:
        """Return the units by falling cost; equals in the order of the walk."""
        return sorted(units, key=lambda unit: (-self._cost(unit), unit))

    def added(self, part: _Part, unit: Subtree) -> float:
        """Return the cost that `unit` adds to `part`: all but the longest prefix that some row of the part has already.

        Rows outside a subtree share no more with any of its rows than they do with all of them, so its ends show it.
        """
        first, last = unit
        at, shared = bisect_left(part.rows, first), 0
        if at and self._shared[first]:
            shared = min(self._shared[part.rows[at - 1] + 1 : first + 1])
        if at < len(part.rows) and self._shared[last]:
            shared = max(shared, min(self._shared[last : part.rows[at] + 1]))
        return self._cost(unit) - self._of(shared)

    def put(self, part: _Part, unit: Subtree) -> None:
        """Add `unit` to `part`."""
        part.cost += self.added(part, unit)
        for row in range(*unit):
            insort(part.rows, row)

    def stretches(self, parts: int) -> list[_Part]:
        """Cut the walk into `parts` stretches of nearly equal cost, where little is shared: a row that adds much to
        those before it shares little with them."""
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
        """Return the rows of each part that is not empty, in the order that `pack` promises."""
        members = sorted(sorted(self._order[row] for row in part.rows) for part in parts if part.rows)
        return [[self._rows[index] for index in indices] for indices in members]

    def _cost(self, unit: Subtree) -> float:
        """Return the cost of these rows alone."""
        return self._before[unit[1]] - self._before[unit[0]] + self._of(self._shared[unit[0]])


def _placed(tree: _Tree, units: Iterable[Subtree], budget: int) -> list[_Part]:
    """Place each unit where it adds least, and then where it leaves least room; in a new part where it fits nowhere."""
    parts: list[_Part] = []
    for unit in units:
        costs = [(tree.added(part, unit), -part.cost, number) for number, part in enumerate(parts)]
        fitting = [(added, minus, number) for added, minus, number in costs if added - minus <= budget]
        if not fitting:
            parts.append(_Part())
        tree.put(parts[min(fitting)[2] if fitting else -1], unit)
    return parts


def _shared_out(tree: _Tree, count: int) -> list[_Part]:
    """Deal the rows out to `count` parts, some of them empty, in the two ways that `lanes` describes."""
    dealt = [_Part() for _ in range(count)]
    for unit in tree.largest_first(tree.units(tree.cost / (count * UNITS_PER_PART))):
        tree.put(min(dealt, key=lambda part: part.cost + tree.added(part, unit)), unit)
    return min((tree.stretches(count), dealt), key=lambda parts: (max(part.cost for part in parts), _total(parts)))


def _total(parts: Iterable[_Part]) -> float:
    return sum(part.cost for part in parts)
