"""Lines of turns: each extends one sequence of ids by what is told and said."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparring.record.identity import DIGEST_BYTES
from sparring.types import Evidence, Message, Source, ToolSpec

START = bytes(DIGEST_BYTES)
"""Digest of a conversation before its first message."""


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """A reply in the tree: the place of its segment, a hash over all ids up to its last, their number, and its line of
    turns, in which it is message number `count` - 1. `key` is the digest of its conversation, `text` what it says,
    without the blanks around it, `agent` whose it is, and `twin` the reply before it with an equal conversation."""

    place: int
    ids: hashlib.blake2b
    length: int
    lane: int
    count: int
    key: bytes
    reply: Message
    text: str
    agent: str
    continued: bool = False
    twin: Node | None = None


@dataclass(slots=True)
class Lane:
    """A line of turns: its messages, as the objects that they were first; its tools, and their digest; the number of
    messages with which its agent first asked, before any client wrote them anew; number and digest of the messages up
    to the last reply, and that reply. `spans` has the number of messages up to the end of each of its segments, and the
    segment's place."""

    heard: list[Message]
    tools: bytes
    specs: tuple[ToolSpec, ...]
    opening: int
    replied: int = 0
    key: bytes = START
    node: Node | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)

    def last_written(self, count: int, written: Container[int]) -> tuple[int | None, int]:
        """Return the place of the last segment that is written and has any of the first `count` messages, and how many
        of these stand up to its end; None and 0 where there is none."""
        last: int | None = None
        held = 0
        for end, place in self.spans if count else ():
            if place not in written:
                break
            last, held = place, min(end, count)
            if end >= count:
                break
        return last, held


class Request(NamedTuple):
    """Request as it was matched.

    Attributes:
        messages: the conversation, replies put together.
        before: number of messages up to the reply that it continues.
        keys: digests of the conversation up to each message after that.
        tools: digest of the tools.
        specs: the tools.
        evidence: of the client.
        node: the reply that it continues; None where it is rendered whole.
        matched: the reply that it would have continued, had the template a bridge.
    """

    messages: Sequence[Message]
    before: int
    keys: Sequence[bytes]
    tools: bytes
    specs: tuple[ToolSpec, ...]
    evidence: Evidence
    node: Node | None
    matched: Node | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """One request, planned: the segment that leads to it, and a hash over its prompt, which has `length` ids.

    `input_place` and `place` are those of its input and its reply. `lane` names a line of turns that extends one id
    sequence (its KV can be kept). `repeat` numbers requests with the very same prompt: their replies must not be drawn
    with the same random numbers. `attempt` counts how often it was asked before. `key` is the digest of all messages,
    of which the first `before` are the conversation of `node`, and `count` are there; `tools` is the digest of the
    tools.
    """

    ids: hashlib.blake2b
    length: int
    parent: int | None
    added: tuple[int, ...]
    source: Source
    input_place: int
    place: int
    lane: int
    repeat: int
    attempt: int
    key: bytes
    tools: bytes
    node: Node | None
    before: int
    count: int
    evidence: Evidence

    @property
    def prompt(self) -> bytes:
        """Digest of all ids of the prompt."""
        return self.ids.digest()


def begins(messages: Sequence[Message], heard: list[Message]) -> bool:
    """Return whether `messages`, which are more, begin with `heard`.

    Lists are compared by their pointers alone as long as these are the same, so that hundreds of messages that have
    left the processor's cache stay out of it. Equal messages pass as well.
    """
    if not isinstance(messages, list):
        return all(map(operator.is_, heard, messages))
    try:
        return heard < messages
    except TypeError:  # messages have no order: the first that differ say so
        return False


def place_named(reply: str) -> int | None:
    """Return the place that an id of a reply bears, whatever a dialect put before it; None where it is no such id."""
    _, separator, number = reply.rpartition("#")
    place = number.partition(".")[0]
    return int(place) if separator and place.isdecimal() else None
