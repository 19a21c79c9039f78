"""Requests for replies of a session, and the parts of the replies: the nouns of `protocols.Session`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from sparring.errors import LimitReached
from sparring.generation import Constraint, FinishReason
from sparring.types import Evidence as Evidence
from sparring.types import Message, ReplyPiece, ToolCall, ToolSpec

NO_EVIDENCE = Evidence()
"""Evidence of a client that sends nothing but the conversation."""


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """Request for the next reply to a conversation.

    Attributes:
        messages: the whole conversation; where it ends with a reply, another reply follows it.
        tools: tools that the prompt shows; without any, the reply is text.
        constraint: form of the reply's text, instead of the run's constraint; no `min_tokens` holds then.
        max_tokens: maximum number of tokens of this reply; a reply that it cuts has hit no limit of the rollout.
        stop: strings that end this reply, in addition to those of the run.
        evidence: what the client sends beside the conversation.
        calls: whether the reply may call the tools; if not, a call is text.
        in_pieces: whether the reply is yielded in pieces before it is whole.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    constraint: Constraint | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    evidence: Evidence = NO_EVIDENCE
    calls: bool = True
    in_pieces: bool = False

    @property
    def callable(self) -> Sequence[ToolSpec]:
        """The tools that the reply may call."""
        return self.tools if self.calls else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """Reply that was sampled and recorded.

    Attributes:
        id: of the rollout's role and the request that it answers: `rl/12/3#5`. No other reply of the rollout has it.
        message: what was said, and the calls.
        finish_reason: `length` where it was cut short.
        stop: the string of the client's that ended it, which its message does not have; None where none did.
        prompt_tokens: number of ids that it was sampled after.
        cached_tokens: number of these whose keys and values were there.
        tokens: the sampled ids; of text that none of our engines sampled, those that it has for who is to imitate it.
        logprobs: of each, under what it was drawn from; empty where nobody sampled them.
        reasoning_tokens: number of the ids that are its thought; None where the format does not tell.
        limit: the limit of the rollout or the context that it hit; None where the client's own `max_tokens` cut it, or
            nothing did.
    """

    id: str
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reasoning_tokens: int | None
    limit: LimitReached | None = None
    stop: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """Head of a streamed reply, known when its first token is sampled.

    Attributes:
        id: as the whole reply's.
        prompt_tokens: number of ids that it is sampled after.
    """

    id: str
    prompt_tokens: int


class ShownReply:
    """Account of the pieces of a reply that were shown."""

    def __init__(self) -> None:
        self._reasoning = self._text = self._calls = 0

    def add(self, piece: ReplyPiece) -> None:
        """Count a piece."""
        if piece.kind == "reasoning":
            self._reasoning += len(piece.text)
        elif piece.kind == "text":
            self._text += len(piece.text)
        else:
            self._calls += 1

    def rest(self, message: Message) -> tuple[ReplyPiece, ...]:
        """Return the pieces that are left to show of a whole reply."""
        reasoning, text = (message.reasoning or "")[self._reasoning :], message.content[self._text :]
        pieces = [ReplyPiece(kind="reasoning", text=reasoning)] if reasoning else []
        if text:
            pieces.append(ReplyPiece(kind="text", text=text))
        return (*pieces, *(ReplyPiece(kind="call", call=call) for call in message.tool_calls[self._calls :]))


def as_shown(piece: ReplyPiece) -> ReplyPiece:
    """Return a piece of a reply as clients are shown it: a call that names no tool is the text that was written."""
    if piece.call is None or piece.call.name:
        return piece
    return ReplyPiece(kind="text", text=piece.call.raw)


def calls_shown(message: Message) -> tuple[ToolCall, ...]:
    """Return the calls of a reply that clients are shown: those that name a tool."""
    return tuple(call for call in message.tool_calls if call.name) if message.tool_calls else ()


def text_shown(message: Message) -> str:
    """Return the text of a reply that clients are shown: with what was written of calls that name no tool."""
    return message.content + "".join([call.raw for call in message.tool_calls if not call.name])


def pieces_of(message: Message) -> tuple[ReplyPiece, ...]:
    """Return the pieces of a whole reply as clients are shown them."""
    return tuple(map(as_shown, ShownReply().rest(message)))


ReplyPart = ReplyHead | ReplyPiece | SampledReply
ReplyStream = AsyncGenerator[ReplyPart, None]
"""Reply as it is sampled: with `in_pieces` the head and pieces that together are the message, then the `SampledReply`,
which is durable by then. A consumer that closes the stream ends the sampling, as `Session.abort` does."""

Reply = Callable[[ReplyRequest], ReplyStream]


async def whole_reply(stream: ReplyStream) -> SampledReply:
    """Read a stream to its end and return the reply."""
    reply: SampledReply | None = None
    async with aclosing(stream) as parts:
        async for part in parts:
            if isinstance(part, SampledReply):
                reply = part
    assert reply is not None, "a stream ends with the reply or raises"
    return reply


class SessionLayer:
    """Layer around the replies of a session: it sees every request and every part, and what becomes of them.

    A layer of its own overrides what it needs; these methods pass everything on.
    """

    def reply(self, request: ReplyRequest, below: Reply) -> ReplyStream:
        """Answer a request from the layer below."""
        return below(request)

    def overflow(self, limit: LimitReached) -> None:
        """Count a request that was refused unread, because its prompt is too long."""

    def deliver(self, reply: str, delivered: bool) -> None:
        """Learn whether the client received a reply, by its id."""
