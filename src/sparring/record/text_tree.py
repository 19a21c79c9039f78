"""Tree of a session without tokens: the branches of `Tree`, made of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from sparring.generation import Constraint
from sparring.record.branches import Transcript, transcripts_of
from sparring.record.forks import is_quoted, texts_of_calls
from sparring.record.forms import Forms
from sparring.record.lines import START
from sparring.record.order import conversation
from sparring.record.tool_lists import ToolLists
from sparring.reply import NO_EVIDENCE
from sparring.types import UNTRAINED, Evidence, Fork, Message, Segment, Source, ToolCall, ToolSpec


class TextTurn(NamedTuple):
    """Request after matching.

    Attributes:
        messages: conversation, with each reply as one message.
        keys: digest of the conversation up to each message.
        parent: index of the reply that the request continues; None if the request begins a branch.
        before: number of messages up to that reply.
    """

    messages: Sequence[Message]
    keys: Sequence[bytes]
    tools: tuple[ToolSpec, ...]
    tools_digest: bytes
    parent: int | None
    before: int


@dataclass(slots=True)
class TextTree:
    """Messages of one role, each a segment without tokens. A request with the same messages and tools up to a reply
    continues that reply; any other request begins a branch."""

    source: Source
    segments: list[Segment] = field(default_factory=list)
    _tool_lists: ToolLists = field(default_factory=ToolLists)
    _replies: dict[bytes, int] = field(default_factory=dict)
    _inputs: dict[tuple[int | None, bytes], int] = field(default_factory=dict)
    _forms: Forms = field(default_factory=Forms)
    _leaves: dict[int, Message] = field(default_factory=dict)
    _constraints: dict[int, Constraint] = field(default_factory=dict)

    def plan(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> TextTurn:
        """Match a request and return its turn. Nothing is written. Raises ValueError if the request has no message."""
        if not messages:
            raise ValueError("a request must have a message")
        tools_digest, specs, _ = self._tool_lists.of(tools)
        keys = self._forms.keys(START, messages)
        parent, before = self._find_continued(messages, keys, tools_digest)
        if parent is None:
            together, other_keys = self._forms.read(messages)
            joined = self._find_continued(together, other_keys, tools_digest)
            if joined[0] is not None:
                messages, keys, (parent, before) = together, other_keys, joined
        return TextTurn(messages, keys, specs, tools_digest, parent, before)

    def ask(self, turn: TextTurn) -> tuple[int, bytes]:
        """Write the messages of a request. Return the index of the last message, and the digests of conversation and
        tools."""
        messages, keys, parent, before = turn.messages, turn.keys, turn.parent, turn.before
        fork = self._start_of_agent(messages) if parent is None else None
        if parent is not None:
            self._leaves.pop(parent, None)
        self._forms.add_messages(keys[before - 1] if before else START, messages[before:], keys[before:], 0)
        for message, key in zip(messages[before:], keys[before:], strict=True):
            key += turn.tools_digest
            index = self._inputs.get((parent, key))
            if index is None:
                index = self._inputs[(parent, key)] = len(self.segments)
                segment = Segment(index=index, parent=parent, source=_source_of(message), tokens=(), message=message)
                root = parent is None
                self.segments.append(replace(segment, tools=turn.tools or None, fork=fork) if root else segment)
            parent = index
        assert parent is not None, "a turn has a message"
        return parent, keys[-1] + turn.tools_digest

    def with_unique_call_ids(self, reply: Message) -> Message:
        """Give new ids to calls of a reply whose ids occurred before: a scripted expert repeats ids, and a program
        distinguishes calls by id."""
        calls: list[ToolCall] = []
        for at, call in enumerate(reply.tool_calls):
            again = self._forms.has_call(call.id) or any(call.id == other.id for other in calls)
            calls.append(replace(call, id=f"call_{len(self.segments)}_{at}") if again else call)
        return replace(reply, tool_calls=tuple(calls)) if calls else reply

    def answer(
        self, request: tuple[int, bytes], reply: Message, evidence: Evidence, constraint: Constraint | None
    ) -> Segment:
        """Write the reply to a request, and return its segment. `request`: result of `ask`."""
        parent, key = request
        index, tools = len(self.segments), key[len(START) :]
        segment = Segment(
            index=index,
            parent=parent,
            source=self.source,
            tokens=(),
            message=reply,
            label=evidence.label or "agent",
            evidence=None if evidence == NO_EVIDENCE else evidence,
        )
        self.segments.append(segment)
        replied = self._forms.add_reply(key[: len(START)], reply, 0, index)
        self._replies[replied + tools] = index
        self._leaves[index] = reply
        if constraint is not None:
            self._constraints[index] = constraint
        return segment

    def deliver(self, index: int, delivered: bool | None) -> None:
        """Record whether a client received the reply with this index; None: unknown."""
        segment = self.segments[index]
        label = "lost" if delivered is False else (segment.evidence or NO_EVIDENCE).label or "agent"
        self.segments[index] = replace(segment, label=label, delivered=delivered)

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the conversation of each branch."""
        return transcripts_of(self.segments, self._constraints, partial(conversation, self.segments))

    def _find_continued(
        self, messages: Sequence[Message], keys: Sequence[bytes], tools: bytes
    ) -> tuple[int | None, int]:
        """Return the index of the reply that a conversation with these digests continues, and the number of messages up
        to it; None and 0 if the conversation begins a branch."""
        before = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
        parent = self._replies.get(keys[before - 1] + tools) if before else None
        return parent, 0 if parent is None else before

    def _start_of_agent(self, messages: Sequence[Message]) -> Fork | None:
        """Return the fork of a sub-agent's conversation, which quotes a call of a reply that has no continuation. None
        if the messages quote no such call."""
        for index, reply in reversed(self._leaves.items()):
            trained = self.segments[index].label not in UNTRAINED
            if trained and any(is_quoted(text, messages) for text in texts_of_calls(reply)):
                return Fork(reason="agent", of=index)
        return None


def _source_of(message: Message) -> Source:
    """Return the source of a message that is not a reply of this session."""
    if message.role == "assistant":
        return "harness"
    return "tool" if message.role == "tool" else "prompt"
