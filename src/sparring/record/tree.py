"""The conversation tree of one role: where a request continues what was sampled, and where it begins anew.

A `Node` stands behind every reply. A request whose history equals a node's conversation continues there: its prompt is
the node's ids bridged by the new messages, never a re-encoding of text (law 1). Any other request is rendered whole and
begins a new branch; that is how an edited history, a compaction or a sub-agent looks in the record.

Everything is kept once: ids in the segments; conversations and prompts as digests, each of which continues the one
before. So the memory of a session is in proportion to its ids, and a late turn takes about the time of an early one.
"""

from __future__ import annotations

import hashlib
import heapq
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from sparring.generation import Completion, Sampling
from sparring.protocols import Renderer
from sparring.record.identity import message_key, tools_key
from sparring.types import Label, Message, Segment, Source, ToolSpec

DIGEST_BYTES = 16
"""Length of a digest."""


@dataclass(kw_only=True, slots=True)
class Node:
    """A reply in the tree: its segment, a hash over all ids up to its last, their number, and its line of turns."""

    segment: int
    ids: hashlib.blake2b
    length: int
    lane: int
    continued: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request, planned: the segment that leads to it, and a hash over its prompt, which has `length` ids.

    `lane` names a line of turns that extends one id sequence (its KV can be kept). `repeat` numbers requests with the
    very same prompt: their replies must not be drawn with the same random numbers. `key` is the digest of the
    tools and all messages; `heard` are the messages that the lane has yet to hear, all of them where it is `anew`.
    """

    ids: hashlib.blake2b
    length: int
    parent: int | None
    added: tuple[int, ...]
    source: Source
    lane: int
    repeat: int
    key: bytes
    tools: bytes
    heard: tuple[Message, ...]
    anew: bool

    @property
    def prompt(self) -> bytes:
        """Digest of all ids of the prompt."""
        return self.ids.digest()


@dataclass(kw_only=True, slots=True)
class Lane:
    """A line of turns: its messages up to the last reply, as the objects that they were, and the digests of its tools
    and of these together with the messages."""

    heard: list[Message]
    tools: bytes
    key: bytes


@dataclass(slots=True)
class Tree:
    """All that one role said and was told, as segments. `plan` reads, `append` writes."""

    renderer: Renderer
    segments: list[Segment] = field(default_factory=list)
    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _requests: dict[bytes, int] = field(default_factory=dict)
    _abandoned: dict[bytes, list[int]] = field(default_factory=dict)
    _inputs: dict[tuple[int | None, tuple[int, ...]], int] = field(default_factory=dict)
    _lanes: dict[int, Lane] = field(default_factory=dict)
    _lane_of_reply: dict[int, int] = field(default_factory=dict)
    _num_lanes: int = 0
    _last: Lane | None = None

    @property
    def last_conversation(self) -> tuple[Message, ...]:
        """The messages of the turn that was written last, its reply included."""
        return () if self._last is None else tuple(self._last.heard)

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Turn:
        """Return the turn that this request is: its place in the tree, and the ids that it adds.

        Raises:
            ValueError: there is no message, or the last one is a reply, which asks for nothing.
        """
        if not messages or messages[-1].role == "assistant":
            raise ValueError("a request must end with a message that is no reply")
        tools_digest = _digest(tools_key(tools).encode())
        same = self._same_objects(messages, tools_digest)
        num_matched = 0 if same is None else len(self._lanes[same].heard)
        keys = _chained(tools_digest if same is None else self._lanes[same].key, messages[num_matched:])
        node, before = (self._nodes[self._lanes[same].key], num_matched) if same is not None else self._deepest(keys)
        new = messages[before:]
        added = None if node is None else self._bridged(node, new, tools)
        if node is not None and added is not None:
            source: Source = "tool" if any(message.role == "tool" for message in new) else "prompt"
            lane = self._new_lane() if node.continued else node.lane
            node.continued = True
            ids, length, parent = node.ids.copy(), node.length, node.segment
        else:
            # A first request is the prompt; any later whole render is the harness's own doing: it rewrote the history.
            source = "harness" if any(message.role == "assistant" for message in messages) else "prompt"
            added = self.renderer.render(messages, tools).tokens
            ids, length, parent, lane = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, None, self._new_lane()
        ids.update(_bytes(added))
        return Turn(
            ids=ids,
            length=length + len(added),
            parent=parent,
            added=added,
            source=source,
            lane=lane,
            repeat=self._repeat(ids.digest()),
            key=keys[-1],
            tools=tools_digest,
            heard=tuple(messages[num_matched:] if lane == same else messages),
            anew=lane != same,
        )

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Return all ids of a turn's prompt [T]."""
        path, at = [turn.added], turn.parent
        while at is not None:
            path.append(self.segments[at].tokens)
            at = self.segments[at].parent
        return tuple(chain.from_iterable(reversed(path)))

    def append(
        self,
        turn: Turn,
        completion: Completion,
        reply: Message,
        sampling: Sampling,
        model: str,
        *,
        label: Label = "agent",
    ) -> list[Segment]:
        """Write a turn down.

        Returns:
            The new segments: the input, unless an earlier branch has the same input here, and the reply.
        """
        new: list[Segment] = []
        parent = self._inputs.get((turn.parent, turn.added))
        if parent is None:
            parent = len(self.segments)
            new.append(
                Segment(index=parent, parent=turn.parent, source=turn.source, tokens=turn.added, message=turn.heard[-1])
            )
            self._inputs[(turn.parent, turn.added)] = parent
        index = parent + 1 if new else len(self.segments)
        versions, kv_versions = completion.versions, completion.kv_versions
        new.append(
            Segment(
                index=index,
                parent=parent,
                source="policy",
                tokens=completion.tokens,
                message=reply,
                model=model,
                logprobs=completion.logprobs,
                versions=versions,
                kv_versions=versions if kv_versions == versions else kv_versions,  # one object where both say the same
                sampling=sampling,
                kept=completion.kept,
                finish_reason=completion.finish_reason,
                label=label,
            )
        )
        self.segments += new
        ids = turn.ids.copy()
        ids.update(_bytes(completion.tokens))
        length = turn.length + len(completion.tokens)
        key = self._hear(turn, reply)
        self._nodes[key] = Node(segment=index, ids=ids, length=length, lane=turn.lane)
        return new

    def abandon(self, turn: Turn) -> None:
        """Take back a planned turn that got no reply: the next request with its prompt is that turn."""
        heapq.heappush(self._abandoned.setdefault(turn.prompt, []), turn.repeat)

    def _repeat(self, prompt: bytes) -> int:
        """Count a request with this prompt, and return its number: the smallest that no other request has."""
        abandoned = self._abandoned.get(prompt)
        if abandoned:
            return heapq.heappop(abandoned)
        number = self._requests.get(prompt, 0)
        self._requests[prompt] = number + 1
        return number

    def _hear(self, turn: Turn, reply: Message) -> bytes:
        """Add a turn and its reply to the turn's lane; return the digest of its conversation."""
        (key,) = _chained(turn.key, [reply])
        lane = self._lanes.get(turn.lane)
        if lane is not None:
            self._lane_of_reply.pop(id(lane.heard[-1]), None)
        if lane is None or turn.anew:
            lane = self._lanes[turn.lane] = Lane(heard=[], tools=turn.tools, key=key)
        lane.heard += (*turn.heard, reply)
        lane.key = key
        self._last = lane
        self._lane_of_reply[id(reply)] = turn.lane
        return key

    def _same_objects(self, messages: Sequence[Message], tools: bytes) -> int | None:
        """Return the lane whose messages these begin with, up to the very object of its last reply; None where none is.

        A loop that only adds messages sends such objects. Every other request is matched by its keys.
        """
        count = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
        number = self._lane_of_reply.get(id(messages[count - 1])) if count else None
        if number is None:
            return None
        lane = self._lanes[number]
        same = len(lane.heard) == count and lane.tools == tools and _begins(messages, lane.heard)
        return number if same else None

    def _deepest(self, keys: Sequence[bytes]) -> tuple[Node | None, int]:
        """Return the longest recorded conversation that one with these keys begins with, and its number of messages."""
        for length in range(len(keys) - 1, 0, -1):
            node = self._nodes.get(keys[length - 1])
            if node is not None:
                return node, length
        return None, 0

    def _bridged(self, node: Node, new: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        """Return the ids that a bridge adds to a node's; None where the renderer finds no bridge.

        There is none over a reply that was put in: nobody sampled its ids here.
        """
        reply = self.segments[node.segment]
        tokens_before = () if reply.parent is None else tuple(self.segments[reply.parent].tokens)
        bridged = self.renderer.bridge(tokens_before, tuple(reply.tokens), new, tools)
        return None if bridged is None else bridged[len(tokens_before) + len(reply.tokens) :]

    def _new_lane(self) -> int:
        self._num_lanes += 1
        return self._num_lanes - 1


def _begins(messages: Sequence[Message], heard: list[Message]) -> bool:
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


def _chained(before: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Return for each message the digest of all messages up to it."""
    keys = []
    for message in messages:
        before = _digest(before + message_key(message).encode())
        keys.append(before)
    return keys


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
