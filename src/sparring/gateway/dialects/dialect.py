"""Interface of dialects, and the conversations and events that all dialects share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from sparring.errors import refusal
from sparring.gateway.dialects.fields import to_json
from sparring.generation import Constraint
from sparring.record.request import far
from sparring.reply import Evidence, ReplyHead, SampledReply
from sparring.types import Message, ReplyPiece, ToolCall, ToolSpec

NO_RETRY = {"x-should-retry": "false"}
"""Header that tells the vendors' clients that a retry would fail again."""


def _no_conversation(id: str) -> None:
    """Return None: no earlier conversation is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientCall:
    """HTTP request of a client.

    Attributes:
        body: JSON object of the body.
        headers: headers, by names in lower case.
        path: parameters of the path.
        query: parameters of the query.
        leave_out: types of vendor-hosted tools that are dropped from requests instead of refused.
        conversation: function from a reply id to the conversation up to and including that reply; None for an unknown
            id.
    """

    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    leave_out: frozenset[str] = frozenset()
    conversation: Callable[[str], Sequence[Message] | None] = _no_conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """Request of a client, independent of the dialect.

    Attributes:
        messages: whole conversation.
        tools: tools that the prompt shows.
        calls: whether the reply may call the tools; otherwise the reply is text.
        model: model name that the client sent.
        max_tokens: maximum number of tokens of a reply; None: the run's maximum.
        constraint: constraint on the text of the reply.
        samples: number of replies.
        stream: whether the answer is streamed.
        logprobs: whether the answer includes log-probabilities.
        counts: whether a stream ends with the usage.
        noted: fields that have no effect, since the run decides about sampling.
        stop: strings that end the reply.
        evidence: metadata of the request besides the conversation.
        samples_nothing: whether the client wants no reply and only sends a conversation that a later request continues.
        echo: values of the request that the dialect's writer needs, under names of that dialect.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    model: str
    calls: bool = True
    max_tokens: int | None = None
    constraint: Constraint | None = None
    samples: int = 1
    stream: bool = False
    logprobs: bool = False
    counts: bool = False
    noted: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    samples_nothing: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientError:
    """Error as a client sees it.

    Attributes:
        status: HTTP status.
        message: text of the error in our own words.
        field: field of the request that is wrong, in the client's spelling, such as `input[1].role`; empty if there is
            no such field.
        too_long: length of the prompt and the maximum length, if the prompt leaves no room for a reply; None for other
            errors. Dialects word this error as the vendor does, because clients search for that text.
    """

    status: int
    message: str
    field: str = ""
    too_long: tuple[int, int] | None = None


class Dialect(Protocol):
    """API of one vendor.

    Attributes:
        path: path of the endpoint.
        request_id: header with the vendor's request id; empty if the vendor has no such header.
    """

    path: str
    request_id: str

    def read(self, call: ClientCall) -> ClientRequest:
        """Read a request.

        Raises:
            BadInput: the request is malformed or cannot be obeyed.
        """

    def answer(
        self, client_request: ClientRequest, replies: Sequence[SampledReply], bytes_of: BytesOf
    ) -> dict[str, Any]:
        """Write an answer that is not streamed."""

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> AnswerWriter:
        """Return the writer of a streamed answer. Takes the arguments of `answer`."""

    def error(self, error: ClientError) -> dict[str, Any]:
        """Write an error as the body of a response."""


EVENTS = "text/event-stream; charset=utf-8"
"""Content type of server-sent events."""


class AnswerWriter(ABC):
    """Writer of a streamed answer. The samples are interleaved: for each sample the pieces in order, then the end. The
    bytes of all methods together have the content of `Dialect.answer`. Any method may return no bytes.

    Attributes:
        content_type: content type of the stream.
    """

    content_type = EVENTS

    @abstractmethod
    def begin(self, head: ReplyHead) -> bytes:
        """Write the beginning of the answer."""

    @abstractmethod
    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        """Write a piece of a reply."""

    @abstractmethod
    def end(self, sample: int, reply: SampledReply) -> bytes:
        """Write the end of a reply. The reply is durable, and all its pieces were written."""

    def close(self) -> bytes:
        """Write the end of the answer, if the end of a reply is not the end of the answer."""
        return b""

    @abstractmethod
    def fail(self, error: ClientError) -> bytes:
        """Write an error that replaces the rest of the answer."""

    def ping(self) -> bytes:
        """Write a keep-alive event, which may come before the beginning; by default a comment, which clients ignore."""
        return b": ping\n\n"


@dataclass(slots=True)
class ReplyParts:
    """Parts of a reply in a conversation, while its request is read."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        """Join the parts into the reply."""
        reasoning = "".join(self.thoughts) or None
        content, calls = "".join(self.texts), tuple(self.calls)
        return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


class BytesOf(Protocol):
    """Function from a token id to its bytes, which may be a part of a character."""

    def __call__(self, token: int) -> bytes:
        """Return the bytes."""


def event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event, named by the field `type` of the data if there is such a field."""
    name = b"event: %b\n" % data["type"].encode() if "type" in data else b""
    return b"%bdata: %b\n\n" % (name, to_json(data))


def thought_tokens(replies: Sequence[SampledReply]) -> int | None:
    """Return the number of reasoning tokens of all replies; None if the number is unknown for one of the replies."""
    counts = [reply.reasoning_tokens for reply in replies if reply.reasoning_tokens is not None]
    return sum(counts) if len(counts) == len(replies) else None


def is_left_out(kind: object, leave_out: Collection[str]) -> bool:
    """Return whether tools of this type are dropped from requests: `leave_out` contains the type, with or without its
    date."""
    return isinstance(kind, str) and any(kind == name or kind.startswith(f"{name}_") for name in leave_out)


def noted_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the headers that ask for something that has no effect here."""
    return tuple(name for name in ("anthropic-beta", "openai-beta") if headers.get(name))


class Placed(NamedTuple):
    """Message of a conversation, and its place in the request, such as `input[1]`."""

    where: str
    message: Message


def order_answers(
    conversation: Sequence[Placed], field: str, system: str = "", *, replies_follow: bool = False
) -> tuple[Message, ...]:
    """Sort the answers to each reply's calls in the order of the calls, and check the conversation.

    Args:
        field: field of the conversation, for refusals.
        system: system message from a field of its own; empty if there is no such message.
        replies_follow: whether the vendor allows a conversation that ends with a reply, and answers with another reply.

    Raises:
        BadInput: the conversation is empty, an answer names no call of the reply before it, or the last message is a
            reply that cannot be followed by another or has unanswered calls.
    """
    ordered = [Message(role="system", content=system)] if system else []
    for are_answers, placed in groupby(conversation, lambda each: each.message.role == "tool"):
        run = list(placed)
        if are_answers:
            calls = next((m.tool_calls for m in reversed(ordered) if m.role == "assistant"), ())
            numbers = {call.id: number for number, call in enumerate(calls)}
            for where, answer in run:
                if answer.tool_call_id not in numbers:
                    got = f"one to {answer.tool_call_id!r}"
                    raise refusal(where, "an answer to a call of the reply before it", got, "send the call")
            run.sort(key=lambda each: numbers[each.message.tool_call_id or ""])
        ordered += [each.message for each in run]
    if not conversation:
        raise refusal(field, "a message to reply to at the end", "none", "add one")
    if ordered[-1].role == "assistant":
        if not replies_follow:
            do = "end it with a user's message: prefill is not supported"
            raise refusal(field, "a message to reply to at the end", "a reply", do)
        if ordered[-1].tool_calls:
            raise refusal(conversation[-1].where, "answers to its calls behind it", "none", "send them")
    return tuple(ordered)


def length_text(too_long: tuple[int, int]) -> str:
    """Return the length of a prompt that was too long, as text for clients. Tokens are only counted up to twice the
    maximum; a longer prompt has "more than" so many.
    """
    length, room = too_long
    return f"more than {2 * room}" if tuple(too_long) == far(room) else str(length)
