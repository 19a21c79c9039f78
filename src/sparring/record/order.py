"""Order of a record: its segments stand in the order of requests, whatever the order in which these were answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparring.types import Message, Segment, ToolSpec, main_replies


def settled(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return segments, numbered by the places that they took when their requests were planned, as those of a
    trajectory: in the order of their places, numbered without a gap.

    A gap is left by a request without a reply. Of several segments in one place the last counts: it says more of the
    same one (that its client never got it, that it turned out to be a summary). The segments of older records are
    numbered without a gap, in the order in which they were written; they stay as they are.
    """
    by_place = {segment.index: segment for segment in segments}
    places = sorted(by_place)
    ordered = [by_place[place] for place in places]
    if not places or places[-1] == len(places) - 1:
        return tuple(ordered)
    index = {place: at for at, place in enumerate(places)}
    return tuple(_moved(segment, index) for segment in ordered)


def _moved(segment: Segment, index: dict[int, int]) -> Segment:
    """Return a segment with indices in the place of places."""
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
    """Return all messages up to the end of a segment of a trajectory: a conversation that left another has the messages
    that both have from there. Records of before have only the last message of what was told at once."""
    messages: list[tuple[Message, ...]] = []
    while index is not None:
        segment = segments[index]
        messages.append(segment.told)
        index = segment.parent
        if index is None and segment.fork is not None and segment.fork.of is not None:
            messages.append(conversation(segments, segment.fork.of)[: segment.fork.message])
    return tuple(message for part in reversed(messages) for message in part)


def conversation_of(segments: Sequence[Segment], trajectory: str, reply: str) -> tuple[Message, ...] | None:
    """Return all messages up to a reply of a trajectory, itself included.

    Args:
        segments: of the trajectory.
        trajectory: its id.
        reply: id of the reply, which bears the place of its segment.
    """
    owner, _, place = reply.rpartition("#")
    for segment in reversed(segments):
        at = segment.index if segment.place is None else segment.place
        if owner == trajectory and str(at) == place and segment.model is not None:
            return conversation(segments, segment.index)
    return None


def tools_of(segments: Sequence[Segment], index: int) -> tuple[ToolSpec, ...]:
    """Return the tools of the request that a segment of a trajectory belongs to."""
    at: int | None = index
    while at is not None:
        segment = segments[at]
        if segment.tools is not None:
            return segment.tools
        at = segment.parent if segment.parent is not None or segment.fork is None else segment.fork.of
    return ()


def last_words(segments: Sequence[Segment]) -> Message | None:
    """Return the main agent's last reply that called nothing; None where there is none."""
    spoken = (segment.message for segment in reversed(main_replies(segments)))
    return next((message for message in spoken if message is not None and not message.tool_calls), None)
