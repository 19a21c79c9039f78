"""Order of the replies of a member, for references: what follows a reply along branches and quotes.

A chat is in the order of its replies. In a tree a reply is followed by that of the replies going on from it below which
the latest one stands; one that none goes on from by the first that quotes it, else by the end. What hangs on a reply is
a branch that does not begin where another one ends: it is earned with the reply, up to the place where it meets the
others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparring.testing.golden.groups import Plain


def following(member: Plain) -> list[int | None]:
    """For each reply the reply that follows it; None is the end."""
    count = len(member["turns"])
    quotes = member.get("quotes", [[]] * count)
    after: list[int | None] = []
    for at in range(count):
        own = [other for other in range(at + 1, count) if member["follows"][other] == at]
        quoting = [other for other in range(at + 1, count) if at in quotes[other]]
        after.append(max(own, key=lambda reply: max(_below(member, reply))) if own else min(quoting, default=None))
    return after


def _below(member: Plain, reply: int) -> list[int]:
    """The reply and all that go on from it."""
    own = [other for other, follows in enumerate(member["follows"]) if follows == reply]
    return [reply, *(deep for other in own for deep in _below(member, other))]


def preceding(member: Plain) -> list[int | None]:
    """For each reply the one whose chain it goes on: that of its own branch, else the latest that it follows."""
    after = following(member)
    chosen: list[int | None] = []
    for at, follows in enumerate(member["follows"]):
        leading = [other for other, then in enumerate(after) if then == at]
        chosen.append(follows if follows in leading else max(leading, default=None))
    return chosen


def hanging(member: Plain) -> dict[int, int]:
    """The first reply of each chain that hangs on a reply, with that reply."""
    after, before = following(member), preceding(member)
    quotes = member.get("quotes", [[]] * len(after))
    on: dict[int, int] = {}
    for first in (at for at, leads in enumerate(before) if leads is None):
        cause = member["follows"][first] if member["follows"][first] >= 0 else max(quotes[first], default=-1)
        if cause >= 0:
            way = _way(cause, after)
        else:
            meets = after[_way_within(first, after, before)[-1]]
            tail = max(at for at, then in enumerate(after) if then is None) if meets is None else before[meets]
            way = _way(tail, before)
        possible = [at for at in way if at < first]
        if possible and first not in way:
            on[first] = max(possible)
    return on


def _way(at: int | None, to: Sequence[int | None]) -> list[int]:
    way = []
    while at is not None:
        way.append(at)
        at = to[at]
    return way


def _way_within(first: int, after: Sequence[int | None], before: Sequence[int | None]) -> list[int]:
    """The replies of the chain that begins with `first`."""
    chain = [first]
    while (then := after[chain[-1]]) is not None and before[then] == chain[-1]:
        chain.append(then)
    return chain


def next_of(member: Plain, lengths: Sequence[int]) -> list[int | None]:
    """For each of the steps of all replies, of which a reply has as many as `lengths` says and one at least, the step
    that follows."""
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    steps: list[int | None] = []
    for start, length, then in zip(starts, lengths, following(member), strict=True):
        steps += [*range(start + 1, start + length), None if then is None else starts[then]]
    return steps


def with_branches(member: Plain, r: np.ndarray, lengths: Sequence[int], discount: float, rest: float) -> np.ndarray:
    """Rewards of steps with what hangs on a reply at its last step, and the rest of the outcome at every end."""
    after, before, on = following(member), preceding(member), hanging(member)
    starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]

    def worth(first: int) -> float:
        steps = [s for at in _way_within(first, after, before) for s in range(starts[at], starts[at + 1])]
        ends = {starts[at + 1] - 1: at for at in range(len(lengths))}
        return sum(discount**n * (r[s] + (hung(ends[s]) if s in ends else 0.0)) for n, s in enumerate(steps))

    def hung(reply: int) -> float:
        return sum(discount * worth(first) for first, at in on.items() if at == reply)

    made = r.copy()
    for at, then in enumerate(after):
        made[starts[at + 1] - 1] += hung(at) + (rest if then is None else 0.0)
    return made


def to_go(r: np.ndarray, discount: float, following_steps: Sequence[int | None]) -> np.ndarray:
    """sum_n discount^n * r of the n-th step from each step on."""
    return np.array([sum(discount**n * r[s] for n, s in enumerate(_way(at, following_steps))) for at in range(len(r))])


def places(member: Plain) -> list[tuple[int, ...]]:
    """Where each reply stands: its number in the last chain; else the place of what its chain hangs on, which of those
    that hang there it is, and its number."""
    after, before, on = following(member), preceding(member), hanging(member)
    made: dict[int, tuple[int, ...]] = {}
    alone = 0
    last = max((at for at, then in enumerate(after) if then is None), default=-1)
    for first in (at for at, leads in enumerate(before) if leads is None):
        chain = _way_within(first, after, before)
        if last in chain:
            prefix: tuple[int, ...] = ()
        elif first in on:
            prefix = (*made[on[first]], [other for other, at in on.items() if at == on[first]].index(first))
        else:
            prefix, alone = (-1, alone), alone + 1
        made |= {at: (*prefix, number) for number, at in enumerate(chain)}
    return [made[at] for at in range(len(after))]
