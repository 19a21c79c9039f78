"""The conversation tree of one role: where a request continues what was sampled, and where it begins anew.

A `Node` stands behind every reply. A request whose history equals a node's conversation continues there: its prompt is the
node's ids bridged by the new messages, never a re-encoding of text (law 1). Any other request is rendered whole and begins
a new branch; that is how an edited history, a compaction or a sub-agent looks in the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sparring.generation import Completion, Sampling
from sparring.protocols import Renderer
from sparring.record.identity import conversation_key, message_key, tools_key
from sparring.types import Message, Segment, Source, ToolSpec


@dataclass(kw_only=True, slots=True)
class Node:
    """A reply in the tree: the ids it was sampled after, its own ids, and the conversation up to and including it."""

    segment: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    lane: int
    continued: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One request, planned: the prompt to send and the segment that leads to it.

    `lane` names a line of turns that extends one id sequence (its KV can be kept). `repeat` counts earlier requests with
    the very same prompt: their replies must not be drawn with the same random numbers.
    """

    prompt: tuple[int, ...]
    parent: int | None
    added: tuple[int, ...]
    source: Source
    message: Message
    lane: int
    repeat: int
    key: tuple[str, tuple[str, ...]]


@dataclass(slots=True)
class Tree:
    """All that one role said and was told, as segments. `plan` reads, `append` writes."""

    renderer: Renderer
    segments: list[Segment] = field(default_factory=list)
    _nodes: dict[tuple[str, tuple[str, ...]], Node] = field(default_factory=dict)
    _asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _told: dict[tuple[int | None, tuple[int, ...]], int] = field(default_factory=dict)
    _lanes: int = 0

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Turn:
        """Where this request belongs, and its prompt.

        Raises:
            ValueError: there is no message, or the last one is a reply, so nothing is asked.
        """
        if not messages or messages[-1].role == "assistant":
            raise ValueError("a request must end with a message that is no reply")
        key = (tools_key(tools), conversation_key(messages))
        node, known = self._deepest(key)
        new = messages[known:]
        # A renderer refuses to bridge a reply that was put in: those ids nobody sampled here.
        bridged = None if node is None else self.renderer.bridge(node.prompt, node.completion, new, tools)
        if node is not None and bridged is not None:
            source: Source = "tool" if any(message.role == "tool" for message in new) else "prompt"
            added = bridged[len(node.prompt) + len(node.completion) :]
            lane = self._new_lane() if node.continued else node.lane
            node.continued = True
            return self._turn(bridged, node.segment, added, source, new[-1], lane, key)
        # A first request is the prompt; any later whole render is the harness's own doing: it rewrote the history.
        rewritten = any(message.role == "assistant" for message in messages)
        prompt = self.renderer.render(messages, tools).tokens
        return self._turn(
            prompt, None, prompt, "harness" if rewritten else "prompt", messages[-1], self._new_lane(), key
        )

    def append(self, turn: Turn, completion: Completion, reply: Message, sampling: Sampling, model: str) -> list[Segment]:
        """Write a turn down.

        Returns:
            The new segments: what was told, unless an earlier branch was told the same here, and the reply.
        """
        new: list[Segment] = []
        parent = self._told.get((turn.parent, turn.added))
        if parent is None:
            parent = len(self.segments)
            new.append(
                Segment(
                    index=parent, parent=turn.parent, source=turn.source, tokens=turn.added, message=turn.message
                )
            )
            self._told[(turn.parent, turn.added)] = parent
        index = parent + 1 if new else len(self.segments)
        new.append(
            Segment(
                index=index,
                parent=parent,
                source="policy",
                tokens=completion.tokens,
                message=reply,
                model=model,
                logprobs=completion.logprobs,
                versions=completion.versions,
                kv_versions=completion.kv_versions,
                sampling=sampling,
                kept=completion.kept,
            )
        )
        self.segments += new
        tools, conversation = turn.key
        self._nodes[(tools, (*conversation, message_key(reply)))] = Node(
            segment=index, prompt=turn.prompt, completion=completion.tokens, lane=turn.lane
        )
        return new

    def abandon(self, turn: Turn) -> None:
        """Take back a planned turn that got no reply."""
        self._asked[turn.prompt] -= 1

    def _deepest(self, key: tuple[str, tuple[str, ...]]) -> tuple[Node | None, int]:
        """The longest recorded conversation that this one begins with, and its number of messages."""
        tools, conversation = key
        for length in range(len(conversation) - 1, 0, -1):
            node = self._nodes.get((tools, conversation[:length]))
            if node is not None:
                return node, length
        return None, 0

    def _turn(
        self,
        prompt: tuple[int, ...],
        parent: int | None,
        added: tuple[int, ...],
        source: Source,
        message: Message,
        lane: int,
        key: tuple[str, tuple[str, ...]],
    ) -> Turn:
        repeat = self._asked[prompt]
        self._asked[prompt] += 1
        return Turn(
            prompt=prompt,
            parent=parent,
            added=added,
            source=source,
            message=message,
            lane=lane,
            repeat=repeat,
            key=key,
        )

    def _new_lane(self) -> int:
        self._lanes += 1
        return self._lanes - 1
