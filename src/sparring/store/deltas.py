"""Leading ids that a conversation and its branches share, which are stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from sparring.types import Segment


class Shared(NamedTuple):
    """Leading ids of a segment that occur elsewhere in its trajectory.

    Attributes:
        last: index of the earlier segment that ends the branch in which the ids occur.
        count: number of leading ids that the segment shares with that branch.
    """

    last: int
    count: int  # type: ignore[assignment]  # hides a method of tuples, which nothing calls


def without_shared(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], dict[int, Shared]]:
    """Return a trajectory's segments without the leading ids that a branch shares with the conversation that it leaves,
    and the location of these ids by segment index."""
    if all(segment.fork is None for segment in segments):
        return tuple(segments), {}
    shared: dict[int, Shared] = {}
    stored = list(segments)
    for segment in segments:
        of = None if segment.parent is not None or segment.fork is None else segment.fork.of
        if of is None or of >= segment.index:
            continue
        ids = tuple(segment.tokens)
        # the conversation may share more than the segment at the fork: ids are equal up to the first byte that differs
        ends = [of, *(s.index for s in segments[of + 1 : segment.index] if s.parent == of)]
        longest = max((Shared(end, _common(branch_ids(segments, end), ids)) for end in ends), key=lambda s: s.count)
        if longest.count:
            shared[segment.index] = longest
            stored[segment.index] = replace(segment, tokens=ids[longest.count :])
    return tuple(stored), shared


def with_shared(segments: Sequence[Segment], shared: Mapping[int, Shared]) -> tuple[Segment, ...]:
    """Return a trajectory's segments with all their ids: the inverse of `without_shared`."""
    read = list(segments)
    for index in sorted(shared):
        last, count = shared[index]
        read[index] = replace(read[index], tokens=branch_ids(read, last)[:count] + tuple(read[index].tokens))
    return tuple(read)


def branch_ids(segments: Sequence[Segment], last: int | None) -> tuple[int, ...]:
    """Return all ids from the root of a branch to the end of segment `last`; empty if `last` is None."""
    path: list[Sequence[int]] = []
    at = last
    while at is not None:
        path.append(segments[at].tokens)
        at = segments[at].parent
    return tuple(chain.from_iterable(reversed(path)))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix, by bisection, because comparing slices is faster than comparing single
    ids."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
