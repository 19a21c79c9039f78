"""Order of a record: segments are sorted by the order of requests, even if replies ended in another order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparring.types import Message, Segment, ToolSpec, main_replies


def settled(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments of a trajectory, sorted by place and renumbered without gaps.

    A request without a reply leaves a gap. If several segments have the same place, the last one counts: this is an
    update, such as a label that became known later.
    """
    by_place = {segment.index: segment for segment in segments}
    places = sorted(by_place)
    ordered = [by_place[place] for place in places]
    if not places or places[-1] == len(places) - 1:
        return tuple(ordered)
    index = {place: at for at, place in enumerate(places)}
    return tuple(_renumber(segment, index) for segment in ordered)


def _renumber(segment: Segment, index: dict[int, int]) -> Segment:
    """Return a segment with indices instead of places."""
    at, fork = index[segment.index], segment.fork
    return replace(
        segment,
        index=at,
        place=None if at == segment.index else segment.index,
        parent=None if segment.parent is None else index[segment.parent],
        fork=None if fork is None else replace(fork, of=None if fork.of is None else index[fork.of]),
        quotes=tuple(index[place] for place in segment.quotes),
    )


def conversation(segments: Sequence[Segment], index: int | None) -> tuple[Message, ...]:
    """Return all messages up to the end of a segment. For a branch, these include the messages that it shares with the
    conversation from which it forks."""
    messages: list[tuple[Message, ...]] = []
    while index is not None:
        segment = segments[index]
        messages.append(segment.told)
        index = segment.parent
        if index is None and segment.fork is not None and segment.fork.of is not None:
            messages.append(conversation(segments, segment.fork.of)[: segment.fork.message])
    return tuple(message for part in reversed(messages) for message in part)


def conversation_of(segments: Sequence[Segment], trajectory: str, reply: str) -> tuple[Message, ...] | None:
    """Return all messages up to and including a reply of a trajectory; None if the trajectory has no such reply.
    `reply`: id of the reply, which contains the place of its segment."""
    owner, _, place = reply.rpartition("#")
    for segment in reversed(segments):
        at = segment.index if segment.place is None else segment.place
        if owner == trajectory and str(at) == place and segment.model is not None:
            return conversation(segments, segment.index)
    return None


def tools_of(segments: Sequence[Segment], index: int) -> tuple[ToolSpec, ...]:
    """Return the tools of the request that a segment belongs to."""
    at: int | None = index
    while at is not None:
        segment = segments[at]
        if segment.tools is not None:
            return segment.tools
        at = segment.parent if segment.parent is not None or segment.fork is None else segment.fork.of
    return ()


def last_words(segments: Sequence[Segment]) -> Message | None:
    """Return the main agent's last reply without calls, or None."""
    spoken = (segment.message for segment in reversed(main_replies(segments)))
    return next((message for message in spoken if message is not None and not message.tool_calls), None)
