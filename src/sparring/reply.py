"""Reply of a session: the message, and all that a client of an API wants to know of it."""

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


NO_EVIDENCE = Evidence()
"""Evidence of a client that says nothing of a request beside the conversation."""


Show = Callable[[ReplyHead | ReplyPiece], None]
"""Takes the head of a reply when its first token is sampled, then its pieces as they are decided."""


class AnsweringSession(Session, Protocol):
    """A session that also returns replies that were cut short."""

    @property
    def max_context(self) -> int:
        """Most ids that a prompt and its reply may have together."""

    @property
    def max_prompt_bytes(self) -> int:
        """Most bytes of text that so many ids may have."""

    @property
    def max_reply(self) -> int:
        """Most ids of one reply."""

    def overflow(self, limit: LimitReached) -> None:
        """Take note of a request whose prompt was so long that nobody read it; it was refused with this limit."""

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
            messages: the whole conversation; where it ends with a reply, another one follows that.
            tools: that the prompt shows; without any, the reply is text.
            constraint: what the reply's text must be, in the place of the run's.
            max_tokens: most tokens of this reply that the client wants.
            stop: strings that end this reply, beside those of the run.
            evidence: what the client says of the request beside the conversation.
            calls: whether a call in the reply is one; where not, it is text, whatever tools the prompt shows.
        """

    def deliver(self, reply: str, delivered: bool) -> None:
        """Take note of whether a client got a reply whole. The latest note counts; a reply without one was delivered,
        where nothing says otherwise.

        Args:
            reply: its id.
            delivered: False where its connection broke before.
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
        """Sample and record the reply to a conversation, in pieces: the head, pieces that together are the message, and
        the whole reply, which is durable then. A consumer that leaves the iterator ends the sampling, as `abort` does;
        one that is cancelled drops the request, which is the same turn when it is made again."""

    async def abort(self, reply: str) -> None:
        """End a reply that is being sampled, by its id, with what was sampled so far, which is kept."""

    @property
    def has_turn(self) -> bool:
        """True once the session was answered with a turn of the rollout: no title, and nothing that got lost."""

    @property
    def limit(self) -> LimitReached | None:
        """The limit that the latest request hit, of those that were answered or hit one; None where it was answered
        whole. The session ended by it."""

    @property
    def silence(self) -> str:
        """Fate of the requests, in words, where none was answered with a turn."""

    def refuse(self, reason: str) -> None:
        """Take note of a request that was refused before it came here, and why."""

    @property
    def last_words(self) -> Message | None:
        """The main agent's last reply that called nothing: what it has to say in the end; None where there is none."""

    def conversation(self, reply: str) -> tuple[Message, ...] | None:
        """Return all messages up to a reply, itself included, by its id; None where it is no reply of this session."""

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Return the number of ids of a conversation."""

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one id, which may be a part of a character."""


async def in_pieces(
    reply: Callable[[Show], Coroutine[Any, Any, SampledReply]], abort: Callable[[str], Awaitable[None]]
) -> AsyncIterator[ReplyHead | ReplyPiece | SampledReply]:
    """Yield what a reply shows while it is sampled, then the reply: an implementation of `AnsweringSession.stream`.

    Args:
        reply: samples it.
        abort: ends it, by its id.
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
