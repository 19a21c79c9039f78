"""Replies of a session: the message with everything that an API's response contains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparring.errors import LimitReached
from sparring.generation import Constraint, FinishReason
from sparring.protocols import Session
from sparring.types import Evidence as Evidence
from sparring.types import Message, ReplyPiece, ToolCall, ToolSpec


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
    """Counter of the pieces of a reply that a client has been sent."""

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


NO_EVIDENCE = Evidence()
"""Metadata of a client that sends none with its requests."""


Show = Callable[[ReplyHead | ReplyPiece], None]
"""Receives the head of a reply at its first token, then its pieces when they are decided."""


class AnsweringSession(Session, Protocol):
    """Session that also returns truncated replies."""

    @property
    def max_context(self) -> int:
        """Largest number of tokens in a prompt and its reply together."""

    @property
    def max_prompt_bytes(self) -> int:
        """Largest number of bytes of text in a prompt of `max_context` tokens."""

    @property
    def max_reply(self) -> int:
        """Largest number of tokens in one reply."""

    def overflow(self, limit: LimitReached) -> None:
        """Record a request that was refused with this limit, because its prompt was too long to be read."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
        calls: bool = True,
        show: Show | None = None,
    ) -> SampledReply:
        """Sample and record the reply to a conversation.

        Args:
            messages: whole conversation; after a final reply in it, another reply is sampled.
            tools: tools in the prompt; without any, the reply is text.
            constraint: constraint on the reply's text, which replaces the run's.
            max_tokens: largest number of tokens in this reply that the client allows.
            stop: strings that end this reply, in addition to the run's.
            evidence: metadata that the client sent with the request.
            calls: False parses tool calls as text, even if the prompt has tools.
            show: receiver of the reply's pieces while it is sampled.
        """

    def deliver(self, reply: str, delivered: bool) -> None:
        """Record whether a client received a complete reply. The latest record counts; without any, the reply counts as
        delivered unless something else contradicts.

        Args:
            reply: id of the reply.
            delivered: False if the connection broke before the end.
        """

    def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        constraint: Constraint | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        evidence: Evidence = NO_EVIDENCE,
        calls: bool = True,
    ) -> AsyncIterator[ReplyHead | ReplyPiece | SampledReply]:
        """Sample and record the reply to a conversation, and yield it in pieces: the head, pieces that make up the
        message, and the complete reply, which is durable by then.

        Leaving the iterator ends the sampling, as `abort` does. Cancellation drops the request; the same request, made
        again, is the same turn.
        """

    async def abort(self, reply: str) -> None:
        """End the sampling of a reply, by its id. The tokens sampled so far are kept."""

    @property
    def has_turn(self) -> bool:
        """True once a request was answered with a turn of the rollout: not auxiliary, and not lost."""

    @property
    def limit(self) -> LimitReached | None:
        """Limit that the latest request hit, among those that were answered or hit one; None if it was answered
        completely. The session ended by it."""

    @property
    def silence(self) -> str:
        """Description of what happened to the requests of a session without a turn."""

    def refuse(self, reason: str) -> None:
        """Record a request that was refused before it reached the session, with the reason."""

    @property
    def last_words(self) -> Message | None:
        """Main agent's last reply without tool calls, which is its final answer, or None."""

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to and including a reply, by its id; None for an id of another session."""

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of tokens in a conversation."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""


async def in_pieces(
    reply: Callable[[Show], Coroutine[Any, Any, SampledReply]], abort: Callable[[str], Awaitable[None]]
) -> AsyncIterator[ReplyHead | ReplyPiece | SampledReply]:
    """Yield the head and the pieces of a reply while it is sampled, then the reply: an implementation of
    `AnsweringSession.stream`.

    Args:
        abort: function that ends a reply, by its id.
    """
    parts: asyncio.Queue[ReplyHead | ReplyPiece | None] = asyncio.Queue()
    sampling = asyncio.get_running_loop().create_task(reply(parts.put_nowait))
    sampling.add_done_callback(lambda _: parts.put_nowait(None))
    id = ""
    try:
        while (part := await parts.get()) is not None:
            id = part.id if isinstance(part, ReplyHead) else id
            yield part
        yield sampling.result()
    except GeneratorExit:
        if id and not sampling.done():
            await abort(id)
            await asyncio.wait((sampling,))
        raise
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
