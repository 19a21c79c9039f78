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
        messages: the whole conversation; if it ends with a reply, another reply is sampled after it.
        tools: tools that the prompt shows; without any, the reply is text.
        constraint: form of the reply's text, instead of the run's constraint; `min_tokens` does not apply then.
        max_tokens: maximum number of tokens of this reply; a reply that it truncates has not hit a limit of the
            rollout.
        stop: strings that end this reply, in addition to those of the run.
        evidence: metadata that the client sends with the conversation.
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
        id: id of the reply, made of the rollout's role and the request: `rl/12/3#5`. Unique in the rollout.
        finish_reason: reason why sampling ended; `length` for a truncated reply.
        stop: stop string of the client that ended the reply and is not in its message; None if there was none.
        prompt_tokens: number of tokens in the prompt.
        cached_tokens: number of prompt tokens with a cached KV.
        tokens: sampled ids; for text from another source, the ids by which it can be imitated.
        logprobs: log-probability of each token in the distribution that it was drawn from; empty if nothing was
            sampled.
        reasoning_tokens: number of tokens of reasoning; None if the format has no marker for it.
        limit: limit of the rollout or of the context that truncated the reply; None if it was the client's
            `max_tokens`, or if nothing did.
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
    """Head of a streamed reply, known when its first token is sampled."""

    id: str
    prompt_tokens: int


class ShownReply:
    """Counter of the pieces of a reply that were sent to a client."""

    def __init__(self) -> None:
        self._reasoning = self._text = self._calls = 0

    def add(self, piece: ReplyPiece) -> None:
        """Count a piece that was sent."""
        if piece.kind == "reasoning":
            self._reasoning += len(piece.text)
        elif piece.kind == "text":
            self._text += len(piece.text)
        else:
            self._calls += 1

    def rest(self, message: Message) -> tuple[ReplyPiece, ...]:
        """Return the pieces of a complete reply that have not been sent yet."""
        reasoning, text = (message.reasoning or "")[self._reasoning :], message.content[self._text :]
        pieces = [ReplyPiece(kind="reasoning", text=reasoning)] if reasoning else []
        if text:
            pieces.append(ReplyPiece(kind="text", text=text))
        return (*pieces, *(ReplyPiece(kind="call", call=call) for call in message.tool_calls[self._calls :]))


def as_shown(piece: ReplyPiece) -> ReplyPiece:
    """Convert a piece to the form that clients get: a call without a tool name becomes text."""
    if piece.call is None or piece.call.name:
        return piece
    return ReplyPiece(kind="text", text=piece.call.raw)


def calls_shown(message: Message) -> tuple[ToolCall, ...]:
    """Return the tool calls that clients get: those with a tool name."""
    return tuple(call for call in message.tool_calls if call.name) if message.tool_calls else ()


def text_shown(message: Message) -> str:
    """Return the text that clients get, which includes the raw text of calls without a tool name."""
    return message.content + "".join([call.raw for call in message.tool_calls if not call.name])


def pieces_of(message: Message) -> tuple[ReplyPiece, ...]:
    """Return the pieces of a complete reply in the form that clients get."""
    return tuple(map(as_shown, ShownReply().rest(message)))


ReplyPart = ReplyHead | ReplyPiece | SampledReply
ReplyStream = AsyncGenerator[ReplyPart, None]
"""Parts of a reply as it is sampled: with `in_pieces`, first the head and the pieces, which together are the message;
then the `SampledReply`, which is durable when it is yielded. A consumer that closes the stream ends the sampling, as
`Session.abort` does."""

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
    """Layer around a session's replies. It sees each request, each part of a reply, and whether the reply was
    delivered.

    A subclass overrides the methods that it needs; the methods here forward every call unchanged.
    """

    def reply(self, request: ReplyRequest, below: Reply) -> ReplyStream:
        """Answer a request from the layer below."""
        return below(request)

    def overflow(self, limit: LimitReached) -> None:
        """Count a request that was refused unread, because its prompt is too long."""

    def deliver(self, reply: str, delivered: bool) -> None:
        """Note whether the client received the reply with this id."""


def overlap(text: str, string: str) -> int:
    """Return the number of characters at the end of a text that may begin a string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if string.startswith(text[-length:]):
            return length
    return 0
