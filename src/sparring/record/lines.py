"""Lanes and nodes: append-only sequences of ids, and the replies in them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparring.record.identity import DIGEST_BYTES
from sparring.types import Evidence, Message, Source, ToolSpec

START = bytes(DIGEST_BYTES)
"""Digest of an empty conversation."""


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """Recorded reply.

    Attributes:
        place: place (segment number) of the reply.
        ids: hash over all ids up to the reply's last.
        length: number of ids up to the reply's last.
        lane: number of its lane.
        count: number of messages up to and including the reply.
        key: digest of the conversation up to and including the reply.
        text: content without surrounding blanks.
        continued: whether a request continues the reply.
        twin: previous reply with the same history (a linked list).
    """

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
    """One append-only sequence of ids (a branch under construction).

    Attributes:
        history: messages; each is the object from the first request that contained the message.
        tools: digest of the tools.
        opening: number of messages in the first request of its agent.
        replied: number of messages up to the last reply.
        key: digest of the messages up to the last reply.
        node: last reply.
        spans: segments, each as the number of messages up to the segment's end, and the segment's place.
    """

    history: list[Message]
    tools: bytes
    specs: tuple[ToolSpec, ...]
    opening: int
    replied: int = 0
    key: bytes = START
    node: Node | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)

    def last_written(self, count: int, written: Container[int]) -> tuple[int | None, int]:
        """Return the last written segment among the first `count` messages, as its place and the number of messages up
        to its end; None and 0 if no such segment is written."""
        last: int | None = None
        known = 0
        for end, place in self.spans if count else ():
            if place not in written:
                break
            last, known = place, min(end, count)
            if end >= count:
                break
        return last, known


class Request(NamedTuple):
    """Request after matching.

    Attributes:
        messages: conversation, with each reply as one message.
        before: number of messages up to the reply that the request continues.
        keys: digest of the conversation up to each later message.
        tools: digest of the tools.
        node: reply that the request continues; None if the request is rendered whole.
        matched: reply that the request would continue if the renderer had a bridge.
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
    """Planned request.

    Attributes:
        ids: hash over the ids of the prompt.
        length: number of ids of the prompt.
        parent: place of the segment before the input; None for a root.
        added: ids of the input.
        place: place of the reply.
        lane: number of the reply's lane, whose KV cache can be reused.
        repeat: number of earlier requests with the same prompt, which must draw other random numbers.
        attempt: number of earlier attempts at this turn.
        key: digest of all messages.
        tools: digest of the tools.
        node: reply that the request continues; None if the request is rendered whole.
        before: number of messages up to that reply.
        count: number of all messages.
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


def begins(messages: Sequence[Message], prefix: list[Message]) -> bool:
    """Return whether `messages` begins with `prefix`, which must be shorter.

    Lists compare elements by identity first, so the comparison does not read hundreds of messages into the cache of the
    processor. Equal messages match as well.
    """
    if not isinstance(messages, list):
        return all(map(operator.is_, prefix, messages))
    try:
        return prefix < messages
    except TypeError:  # messages have no order, so the first difference raises
        return False


def place_named(reply: str) -> int | None:
    """Return the place (segment number) in the id of a reply; None if `reply` is not the id of a reply. A dialect may
    put a prefix before the id."""
    _, separator, number = reply.rpartition("#")
    place = number.partition(".")[0]
    return int(place) if separator and place.isdecimal() else None
