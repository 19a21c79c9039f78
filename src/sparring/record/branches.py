"""Branches of a record as conversations of messages, one per agent, in which each reply is trained once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparring.generation import Constraint
from sparring.record.order import tools_of
from sparring.types import UNTRAINED, Message, Segment, ToolSpec

SPOKEN = ("policy", "expert", "teacher")
"""Sources of segments that are replies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """Conversation of one branch of a role, up to the last reply of its agent.

    Attributes:
        messages: conversation, which ends with the reply.
        imitated: indices in `messages` of the replies to imitate; None: all replies. A reply that two branches share is
            imitated in the first.
        prompt: number of messages of the branch's first prompt, which was rendered whole; None if that prompt ends at
            the first reply.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    imitated: tuple[int, ...] | None = None
    prompt: int | None = None


def transcripts_of(
    segments: Sequence[Segment],
    constraints: Mapping[int, Constraint],
    messages: Callable[[int], tuple[Message, ...]],
) -> tuple[Transcript, ...]:
    """Return the conversation of each branch, in the order of the requests for their last replies.

    A branch is a path from a root to the last reply of an agent; a compaction counts as a reply. Auxiliary, lost and
    truncated replies do not end a branch: such replies are context if a later reply follows them.

    Args:
        constraints: constraints of replies, by the index of the reply's segment.
        messages: function from the index of a reply to the conversation up to that reply, with the messages of its
            prompt.
    """
    replies = {segment.index for segment in segments if is_imitable(segment)}
    inner: set[int] = set()
    for index in replies:
        at = segments[index].parent
        while at is not None and at not in replies:
            at = segments[at].parent
        if at is not None:
            inner.add(at)
    taken: set[int] = set()
    transcripts = []
    for end in sorted(replies - inner):
        path = _path(segments, end)
        own = [segment.index for segment in path if segment.index in replies and segment.index not in taken]
        taken.update(own)
        transcripts.append(_transcript(segments, path, own, constraints, messages(end)))
    return tuple(transcripts)


def is_imitable(segment: Segment) -> bool:
    """Return whether a segment is a complete reply of an agent: not auxiliary, lost or truncated."""
    reply = segment.source in SPOKEN and segment.message is not None
    return reply and segment.label not in UNTRAINED and segment.finish_reason != "length"


def _transcript(
    segments: Sequence[Segment],
    path: Sequence[Segment],
    own: Sequence[int],
    constraints: Mapping[int, Constraint],
    messages: tuple[Message, ...],
) -> Transcript:
    """Return the conversation of a path. `own`: indices of the replies to imitate."""
    place = len(messages) - sum(len(segment.told) for segment in path)
    imitated, prompt = [], None
    for segment in path:
        place += len(segment.told)
        if segment.source not in SPOKEN:
            continue
        prompt = place - 1 if prompt is None else prompt
        if segment.index in own:
            imitated.append(place - 1)
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    return Transcript(
        messages=messages,
        tools=tools_of(segments, path[-1].index),
        constraints=tuple(constraints[segment.index] for segment in path if segment.index in constraints),
        imitated=None if imitated == replies else tuple(imitated),
        prompt=None if prompt == replies[0] else prompt,
    )


def _path(segments: Sequence[Segment], index: int) -> list[Segment]:
    path: list[Segment] = []
    at: int | None = index
    while at is not None:
        path.append(segments[at])
        at = segments[at].parent
    return path[::-1]
