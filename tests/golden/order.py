"""Order of the replies of a member, for references: what follows a reply on its branch.

A chat is in the order of its replies. In a tree a reply is followed by that of the replies going on from it below which
the latest one stands; one that none goes on from is followed by the end. Every other branch hangs on a reply before it:
what it earns is earned with that reply.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparring.batch.plain_groups import Plain


def following(member: Plain) -> list[int | None]:
    """For each reply the reply that follows it; None is the end."""
    count = len(member["turns"])
    after: list[int | None] = []
    for at in range(count):
        own = [other for other in range(at + 1, count) if member["follows"][other] == at]
        after.append(max(own, key=lambda reply: max(_below(member, reply))) if own else None)
    return after


def _below(member: Plain, reply: int) -> list[int]:
    """The reply and all that go on from it."""
    own = [other for other, follows in enumerate(member["follows"]) if follows == reply]
    return [reply, *(deep for other in own for deep in _below(member, other))]


def preceding(member: Plain) -> list[int | None]:
    """For each reply the one that it follows; None where it begins a chain."""
    after = following(member)
    return [follows if follows >= 0 and after[follows] == at else None for at, follows in enumerate(member["follows"])]


def hanging(member: Plain) -> dict[int, int]:
    """The first reply of each chain that hangs on a reply, with that reply: of those that follow what the chain goes on
    from the last before it; of all where it goes on from the prompt."""
    after, before = following(member), preceding(member)
    on: dict[int, int] = {}
    for first in (at for at, leads in enumerate(before) if leads is None and at):
        cause = member["follows"][first]
        on[first] = max(at for at in _way(cause, after) if at < first) if cause >= 0 else first - 1
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
    """Return the place of each reply: its number in the last chain; else the place of what its chain hangs on, which of
    those that hang there it is, and its number."""
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
