"""Ids that a conversation has in common with the one that it leaves: these are stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from sparring.types import Segment


class Shared(NamedTuple):
    """First ids of a segment, which stand elsewhere in its trajectory.

    Attributes:
        last: index of a segment before this one.
        count: the first so many of all ids up to the end of that segment are this one's first.
    """

    last: int
    count: int  # type: ignore[assignment]  # hides a method of tuples, which nothing calls


def without_shared(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], dict[int, Shared]]:
    """Return the segments of a trajectory, those that begin a branch without the ids that the conversation which they
    leave has too, and where these stand, by the indices of the segments."""
    if all(segment.fork is None for segment in segments):
        return tuple(segments), {}
    shared: dict[int, Shared] = {}
    stored = list(segments)
    for segment in segments:
        of = None if segment.parent is not None or segment.fork is None else segment.fork.of
        if of is None or of >= segment.index:
            continue
        ids = tuple(segment.tokens)
        # the branch that is left goes on behind what both were told: ids are equal up to the byte that differs
        ends = [of, *(s.index for s in segments[of + 1 : segment.index] if s.parent == of)]
        longest = max((Shared(end, _common(_ids(segments, end), ids)) for end in ends), key=lambda s: s.count)
        if longest.count:
            shared[segment.index] = longest
            stored[segment.index] = replace(segment, tokens=ids[longest.count :])
    return tuple(stored), shared


def with_shared(segments: Sequence[Segment], shared: Mapping[int, Shared]) -> tuple[Segment, ...]:
    """Return the segments of a trajectory with all their ids: the other way of `without_shared`."""
    read = list(segments)
    for index in sorted(shared):
        last, count = shared[index]
        read[index] = replace(read[index], tokens=_ids(read, last)[:count] + tuple(read[index].tokens))
    return tuple(read)


def _ids(segments: Sequence[Segment], last: int) -> tuple[int, ...]:
    """Return all ids from the root of a branch to the end of a segment."""
    path: list[Sequence[int]] = []
    at: int | None = last
    while at is not None:
        path.append(segments[at].tokens)
        at = segments[at].parent
    return tuple(chain.from_iterable(reversed(path)))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many first ids both have: by halves, because slices are compared fast and single ids are not."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low
