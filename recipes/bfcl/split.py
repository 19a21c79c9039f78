"""Tasks dealt to training and evaluation so that no function is in both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from package import Row

from sparring.envs.splits import derived_seed, normalised


def components(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups of which no two share a function's name, of any candidate, or a question."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for row in rows:
        first, *others = marks(row)
        for other in others:
            parent[root(other)] = root(first)
    grouped: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[root(marks(row)[0])].append(row)
    return list(grouped.values())


def marks(row: Row) -> list[str]:
    """Return what keeps a row on the side of others that have it too: names of functions, and its question."""
    return [*(f"function {function['name']}" for function in row.functions), f"question {normalised(row.question)}"]


def dealt(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Return the rows of training and those held out, in the order of `rows`.

    Groups are dealt whole, the largest first, each to the side that lacks more of its categories. The same rows are
    dealt the same way in whatever order they come.

    Args:
        rows: of all categories.
        share: of each category, about how much is held out.
    """
    total = Counter(row.category for row in rows)
    wanted = {side: {c: total[c] * part for c in total} for side, part in (("train", 1 - share), ("held", share))}
    got = {side: Counter[str]() for side in wanted}
    held: set[str] = set()

    def lack(side: str, group: Iterable[Row]) -> float:
        return sum(1 - got[side][row.category] / wanted[side][row.category] for row in group)

    groups = components(rows)
    for group in sorted(groups, key=lambda each: (-len(each), derived_seed("deal", min(row.id for row in each)))):
        side = "held" if lack("held", group) > lack("train", group) else "train"
        got[side].update(row.category for row in group)
        if side == "held":
            held.update(row.id for row in group)
    return [row for row in rows if row.id not in held], [row for row in rows if row.id in held]


def in_turn(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in an order of which every beginning has the categories in about the share that all have."""
    places: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda each: derived_seed("order", each.id)):
        places[row.category].append(row)
    spread = [((n + 0.5) / len(of), c, row) for c, of in places.items() for n, row in enumerate(of)]
    return [row for _, _, row in sorted(spread, key=lambda each: each[:2])]
