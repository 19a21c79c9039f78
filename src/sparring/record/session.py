"""Base of recorded sessions, with layers around the replies and an account of the requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial

from sparring.errors import BadInput, LimitReached
from sparring.generation import Constraint
from sparring.record.branches import Transcript
from sparring.record.journal import SessionJournal
from sparring.record.order import conversation_of, last_words
from sparring.record.rewards import OutsideRewards
from sparring.reply import Reply, ReplyRequest, ReplyStream, SampledReply, SessionLayer, whole_reply
from sparring.types import UNTRAINED, Message, Outcome, Segment, Timing, ToolSpec, Trajectory


class RequestAccount(SessionLayer):
    """Innermost layer of a session: an account of its requests. The latest request decides how the session ended: a
    client that was cut short and then got another reply has recovered.

    Attributes:
        limit: limit that the latest request hit; None after a complete answer. Refused requests do not count.
        refused: reason of the latest refusal; empty if there was no refusal.
    """

    def __init__(self) -> None:
        self.limit: LimitReached | None = None
        self.refused = ""
        self._made = self._latest = 0

    async def reply(self, request: ReplyRequest, below: Reply) -> ReplyStream:
        """Answer a request, and note the limit that it hits. Limits of requests with label `auxiliary` are not
        noted."""
        self._made += 1
        number = self._made

        def end(limit: LimitReached | None) -> None:
            if number > self._latest and request.evidence.label != "auxiliary":  # a later one may be answered already
                self._latest, self.limit = number, limit

        try:
            async with aclosing(below(request)) as parts:
                async for part in parts:
                    if isinstance(part, SampledReply):
                        end(part.limit)
                    yield part
        except LimitReached as limit:
            end(limit)
            raise
        except BadInput as error:
            self.refused = str(error)
            raise

    def overflow(self, limit: LimitReached) -> None:
        self._made += 1
        self._latest, self.limit = self._made, limit


class OpenSession(ABC):
    """Session of one role of one rollout. Implements `protocols.Session`; the episode that opened the session also
    reads the record.

    Attributes:
        rewards: external rewards of the rollout; None if the run takes no rewards.
        journal: journal of the rollout, whose recorded replies answer before the engine does; None for a session
            outside a rollout.
    """

    def __init__(self, trajectory: str) -> None:
        self.id = trajectory
        self.account = RequestAccount()
        self.rewards: OutsideRewards | None = None
        self.journal: SessionJournal | None = None
        self._layers: list[SessionLayer] = [self.account]

    @property
    @abstractmethod
    def segments(self) -> Sequence[Segment]:
        """The record so far."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Maximum number of ids of a prompt and its reply together."""

    @property
    @abstractmethod
    def max_prompt_bytes(self) -> int:
        """Maximum number of bytes of a text of `max_context` ids."""

    @property
    @abstractmethod
    def max_reply(self) -> int:
        """Maximum number of ids of one reply."""

    @abstractmethod
    async def abort(self, reply: str) -> None:
        """End a reply that is being sampled; see `protocols.Session`."""

    @abstractmethod
    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation."""

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, which may be part of a character."""

    @abstractmethod
    def _sample(self, request: ReplyRequest) -> ReplyStream:
        """Sample and record a reply, inside all layers."""

    @abstractmethod
    def _delivered(self, reply: str, delivered: bool | None) -> None:
        """Record whether a client received a reply; None: unknown."""

    @abstractmethod
    def trajectory(self, outcome: Outcome, timing: Timing = Timing()) -> Trajectory:
        """Return the record so far. `timing.generate_s` becomes the seconds that the session measured."""

    @abstractmethod
    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the conversation of each branch so far, as messages."""

    @abstractmethod
    async def close(self) -> None:
        """Let the engine forget the conversation. The record stays."""

    def reply(self, request: ReplyRequest) -> ReplyStream:
        reply: Reply = self._sample
        for layer in self._layers:
            reply = partial(layer.reply, below=reply)
        return reply(request)

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, constraint: Constraint | None = None
    ) -> Message:
        reply = await whole_reply(self.reply(ReplyRequest(messages, tools, constraint)))
        if reply.limit is not None:
            raise reply.limit
        return reply.message

    def add_layer(self, layer: SessionLayer) -> None:
        """Wrap later replies in a layer, outside the existing layers."""
        self._layers.append(layer)

    @contextmanager
    def layered(self, layer: SessionLayer) -> Iterator[None]:
        self.add_layer(layer)
        try:
            yield
        finally:
            self._layers.remove(layer)

    def deliver(self, reply: str, delivered: bool | None) -> None:
        if delivered is not None:
            for layer in reversed(self._layers):
                layer.deliver(reply, delivered)
        self._delivered(reply, delivered)

    def overflow(self, limit: LimitReached) -> None:
        for layer in reversed(self._layers):
            layer.overflow(limit)

    def refuse(self, reason: str) -> None:
        self.account.refused = reason

    @property
    def limit(self) -> LimitReached | None:
        return self.account.limit

    @property
    def has_turn(self) -> bool:
        return any(is_reply(segment) and segment.label not in UNTRAINED for segment in self.segments)

    @property
    def silence(self) -> str:
        labels = [segment.label for segment in self.segments if is_reply(segment)]
        if labels:
            return f"got no reply to train, of {len(labels)} that are {' or '.join(sorted(set(labels)))}"
        reason = self.account.refused
        return f"was refused every request, the last for: {reason}" if reason else "requested no reply"

    @property
    def last_words(self) -> Message | None:
        return last_words(self.segments)

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        return conversation_of(self.segments, self.id, reply)


def is_reply(segment: Segment) -> bool:
    """Return whether a segment is a reply of a model, an expert or a teacher in a session."""
    return segment.model is not None or segment.source in ("expert", "teacher")


def trajectory_id(rollout_id: str, role: str) -> str:
    """Return the id of a role's trajectory; for the policy, this is the id of the rollout."""
    return rollout_id if role == "policy" else f"{rollout_id}/{role}"
