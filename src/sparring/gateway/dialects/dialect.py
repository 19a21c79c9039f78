"""Dialects: what a client asks for, in our nouns, and how it is answered, in the vendor's words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from sparring.errors import refusal
from sparring.generation import Constraint
from sparring.record.request import far
from sparring.reply import Evidence, ReplyHead, SampledReply
from sparring.types import Message, ReplyPiece, ToolCall, ToolSpec

NO_RETRY = {"x-should-retry": "false"}
"""Header by which the vendors' clients know that the same request would fail again."""


def _forgets(id: str) -> None:
    """Return None: no reply has this id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientCall:
    """Call of a client, as it came.

    Attributes:
        body: the JSON object that it sent.
        headers: of its request, by names in lower case.
        path: parameters that the path of the endpoint has.
        query: parameters behind the path.
        leave_out: types of tools of the vendor's own servers that the door leaves out of a request, in the place of
            refusing them.
        conversation: gives the conversation up to a reply of this session, the reply included, by the reply's id; None
            for an id of no reply.
    """

    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    leave_out: frozenset[str] = frozenset()
    conversation: Callable[[str], Sequence[Message] | None] = _forgets


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """Request of a client, in our nouns.

    Attributes:
        messages: the whole conversation.
        tools: that the prompt shows.
        calls: whether they may be called; where not, the reply is text.
        model: the name that the client has for the model.
        max_tokens: most tokens that it wants; None leaves it to the run.
        constraint: what the reply's text must be.
        samples: number of replies.
        stream: whether it wants events.
        logprobs: whether it wants the log-probabilities.
        counts: whether the last event of a stream has the usage.
        noted: fields that have no effect on sampling, which is the trainer's.
        stop: strings that end the reply.
        evidence: what the client says of the request beside the conversation.
        samples_nothing: whether the client only tells the conversation, for a later request to continue it.
        echo: what the writer of the answer needs of the request, by names of the dialect's own.
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
    """Error as a client is told of it.

    Attributes:
        status: of HTTP.
        message: of ours.
        field: of the request that it is about, as the client sent it, such as `input[1].role`; empty for none.
        too_long: ids of a prompt that leaves no room for a reply, and the room; None of other errors. Dialects say this
            in the vendor's words: clients look for these.
    """

    status: int
    message: str
    field: str = ""
    too_long: tuple[int, int] | None = None


class Dialect(Protocol):
    """One vendor's API.

    Attributes:
        path: of the endpoint.
        request_id: name of the header in which the vendor names each request; empty where it does not.
    """

    path: str
    request_id: str

    def read(self, call: ClientCall) -> ClientRequest:
        """Read a request.

        Raises:
            BadInput: it is malformed, or asks for what cannot be had.
        """

    def answer(
        self, client_request: ClientRequest, replies: Sequence[SampledReply], bytes_of: BytesOf
    ) -> dict[str, Any]:
        """Write the answer."""

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> AnswerWriter:
        """Open the writer of one streamed answer."""

    def error(self, error: ClientError) -> dict[str, Any]:
        """Write an error that stands in the place of an answer."""


EVENTS = "text/event-stream; charset=utf-8"
"""Type of an answer that is written as server-sent events."""


class AnswerWriter(Protocol):
    """Writer of one answer as events. Its replies come side by side, one for each sample: the pieces of one in order,
    then its end. All that was shown of a reply is what `Dialect.answer` says of it. Any method may return nothing.

    Attributes:
        content_type: of what is written.
    """

    content_type: str

    def begin(self, head: ReplyHead) -> bytes:
        """Write what stands before all replies.

        Args:
            head: of the reply that begins first.
        """

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        """Write a piece of a reply."""

    def end(self, sample: int, reply: SampledReply) -> bytes:
        """Write the end of a reply. All its pieces were written, and it is durable."""

    def close(self) -> bytes:
        """Write what stands behind all replies."""

    def fail(self, error: ClientError) -> bytes:
        """Write the error that stands in the place of the rest of the answer."""

    def ping(self) -> bytes:
        """Write that the answer is under way, before its beginning too."""


class BytesOf(Protocol):
    """Bytes of one sampled id, which may be a part of a character."""

    def __call__(self, token: int) -> bytes:
        """Return the bytes."""


def encoded(data: Any) -> bytes:
    """Return plain data as JSON in UTF-8; integers may have any size."""
    try:
        return msgspec.json.encode(data)
    except OverflowError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def typed(data: Any, where: str, kind: type | tuple[type, ...], expected: str) -> Any:
    """Return a value of a request if it has the right type.

    Raises:
        BadInput: it has another.
    """
    if not isinstance(data, kind) or isinstance(data, bool) and kind is int:
        got = "nothing" if data is None else type(data).__name__
        raise refusal(where, expected, got, "correct the request")
    return data


def given(values: Mapping[str, Any], name: str, kind: type, expected: str, default: Any, before: str = "") -> Any:
    """Return a value of a request that may be left out; the default where it is.

    Args:
        values: by their names.
        name: of the value.
        kind: its type.
        expected: the type in words.
        default: what it is where it is left out, or null.
        before: what the values stand in, with a dot.

    Raises:
        BadInput: it has another type.
    """
    value = values.get(name)
    return default if value is None else typed(value, f"{before}{name}", kind, expected)


def switched(values: Mapping[str, Any], name: str, before: str = "") -> bool:
    """Return whether a switch of a request is on; one that is left out is off.

    Raises:
        BadInput: it is neither true nor false.
    """
    return bool(given(values, name, bool, "true or false", False, before))


def count_in(values: Mapping[str, Any], name: str, before: str = "") -> int | None:
    """Return a number of a request, at least 1; None where it is left out.

    Raises:
        BadInput: it is no whole number, or less.
    """
    count: int | None = given(values, name, int, "a whole number", None, before)
    if count is not None and count < 1:
        raise refusal(f"{before}{name}", "at least 1", str(count), "raise it")
    return count


def sorted_fields(
    values: Mapping[str, Any], obeyed: frozenset[str], noted: frozenset[str], before: str = ""
) -> tuple[str, ...]:
    """Return the fields of a request that have no effect, behind the name of what they stand in, if anything.

    Raises:
        BadInput: there is one that can be neither obeyed nor left without effect.
    """
    for name in sorted(values.keys() - obeyed - noted):
        if values[name] is not None:
            do = "leave it out; docs/harnesses.md says which fields have an effect"
            raise refusal(f"{before}{name}", "a field that can be obeyed", "one that cannot", do)
    return tuple(sorted(f"{before}{name}" for name in values.keys() & noted if values[name] is not None))


def is_left_out(kind: object, leave_out: Collection[str]) -> bool:
    """Return whether a door leaves tools of this type out: it names the type, or the type without its date."""
    return isinstance(kind, str) and any(kind == name or kind.startswith(f"{name}_") for name in leave_out)


def texts_in(texts: Any, where: str) -> tuple[str, ...]:
    """Return the texts of a field, none of which may be empty.

    Raises:
        BadInput: it is no list of such texts.
    """
    for text in typed([] if texts is None else texts, where, list, "a list of texts"):
        if not text_in(typed(text, where, str, "a list of texts"), where):
            raise refusal(where, "texts that are not empty", '""', "leave it out")
    return tuple(texts or ())


def noted_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the headers by which a client asks for what has no effect here."""
    return tuple(name for name in ("anthropic-beta", "openai-beta") if headers.get(name))


def call_of(id: str, name: str, arguments: str) -> ToolCall:
    """Return a call as the client sends it back: what does not parse is malformed, as it was shown. Nothing is a call
    without arguments, as servers of this API read it."""
    if not arguments.strip():
        return ToolCall(id=id, name=name, arguments={})
    try:
        parsed = json.loads(arguments, parse_constant=_no_constant)
        if _ESCAPED_HALF.search(arguments.encode()) is not None:
            _encoded(parsed)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return ToolCall(id=id, name=name, arguments=None, raw=arguments)
    return ToolCall(id=id, name=name, arguments=parsed)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as JSON; of a malformed one what was written."""
    return call.raw if call.arguments is None else json.dumps(dict(call.arguments), ensure_ascii=False)


class Placed(NamedTuple):
    """Message of a conversation, and the place in the request where the client tells it, such as `input[1]`."""

    where: str
    message: Message


def in_order(
    conversation: Sequence[Placed], field: str, system: str = "", *, replies_follow: bool = False
) -> tuple[Message, ...]:
    """Return a conversation whose answers stand in the order of the calls that they name: clients send them as they
    came.

    Args:
        conversation: of the request.
        field: that has it.
        system: text that stands before it, in a field of its own; empty for none.
        replies_follow: whether the vendor answers a conversation that ends with a reply, by another behind it.

    Raises:
        BadInput: an answer names no call of the reply before it, the last message is a reply that nothing may follow or
            whose calls have no answers, or there is none.
    """
    ordered = [Message(role="system", content=system)] if system else []
    at = 0
    while at < len(conversation):
        end = at
        while end < len(conversation) and conversation[end].message.role == "tool":
            end += 1
        if end > at:
            calls = next((m.tool_calls for m in reversed(ordered) if m.role == "assistant"), ())
            place = {call.id: number for number, call in enumerate(calls)}
            for where, answer in conversation[at:end]:
                if answer.tool_call_id not in place:
                    got = f"one to {answer.tool_call_id!r}"
                    raise refusal(where, "an answer to a call of the reply before it", got, "send the call")
            answers = [placed.message for placed in conversation[at:end]]
            ordered += sorted(answers, key=lambda answer: place[answer.tool_call_id or ""])
            at = end
        else:
            ordered.append(conversation[at].message)
            at += 1
    if not conversation:
        raise refusal(field, "a message to reply to at the end", "none", "add one")
    if ordered[-1].role == "assistant":
        if not replies_follow:
            do = "end it with a user's message: prefill is not supported"
            raise refusal(field, "a message to reply to at the end", "a reply", do)
        if ordered[-1].tool_calls:
            raise refusal(conversation[-1].where, "answers to its calls behind it", "none", "send them")
    return tuple(ordered)


def text_in(value: str, where: str) -> str:
    """Return a text that UTF-8 can carry.

    Raises:
        BadInput: it has half of a surrogate pair.
    """
    if value.isascii():  # which it knows of itself
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal(where, "text", f"half of a surrogate pair at {error.start}", "correct the request") from None
    return value


def name_in(value: Any, where: str) -> str:
    """Return the name of a tool, which is not empty.

    Raises:
        BadInput: it is no such name.
    """
    if not typed(value, where, str, "a name"):
        raise refusal(where, "a name", '""', "name it")
    return text_in(value, where)


def said_length(too_long: tuple[int, int]) -> str:
    """Return the ids of a prompt that was too long, as clients are told of them. A text that is too long by far is
    counted up to one more than twice the room, of which "more than" is true in any case.

    Args:
        too_long: its ids, as far as they were counted, and the room for it.
    """
    length, room = too_long
    return f"more than {2 * room}" if tuple(too_long) == far(room) else str(length)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that stands for half of a surrogate pair, whether the other half follows or not."""


def _encoded(value: Any) -> None:
    """Raise UnicodeEncodeError for data with half of a surrogate pair."""
    json.dumps(value, ensure_ascii=False).encode()


def body_of(data: bytes) -> dict[str, Any]:
    """Read the body of a request.

    Raises:
        BadInput: it is no JSON object of UTF-8; NaN and infinities are no JSON.
    """
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        body = _read_slowly(data)
    if not isinstance(body, dict):
        raise refusal("body", "a JSON object", type(body).__name__, "correct the request")
    return body


def _read_slowly(data: bytes) -> Any:
    """Read a body that is no plain JSON, to say what is wrong with it, or because a number has no double.

    Raises:
        BadInput: see `body_of`.
    """
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        if _ESCAPED_HALF.search(data) is not None:
            _encoded(body)
    except UnicodeEncodeError as error:
        raise refusal(
            "body", "text", f"half of a surrogate pair: {error.object[error.start]!r}", "correct it"
        ) from None
    except (ValueError, RecursionError) as error:
        coding = next((name for begun, name in COMPRESSED.items() if data.startswith(begun)), "")
        if coding:
            do = "send the body as it is"
            raise refusal("content-encoding", "a body that is not compressed", coding, do) from None
        raise refusal("body", "a JSON object in UTF-8", str(error), "correct the request") from None
    return body


COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""Content codings, by the first bytes of what has them."""
