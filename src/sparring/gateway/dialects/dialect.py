"""Interface of dialects, and readers for the fields of requests that all dialects share."""

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
"""Header that tells the vendors' clients that a retry would fail again."""


def _no_conversation(id: str) -> None:
    """Return None, as for an unknown reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientCall:
    """HTTP request of a client.

    Attributes:
        body: JSON object of the body.
        headers: headers, by names in lower case.
        path: parameters of the path.
        query: parameters of the query.
        leave_out: types of vendor-hosted tools that the door drops from requests instead of refusing them.
        conversation: function from a reply id to the conversation up to that reply, itself included; None for an
            unknown id.
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
        calls: whether the reply may call the tools; if not, it is text.
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
        samples_nothing: whether the client only sends a conversation, for a later request to continue.
        echo: values of the request that the dialect's writer needs, by its own names.
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
        message: our text.
        field: field of the request that is wrong, in the client's spelling, such as `input[1].role`; empty if there is
            no such field.
        too_long: length of a prompt that leaves no room for a reply, and the room; None for other errors. Dialects use
            the vendor's wording for it, because clients search for that.
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
        """Write an answer that is not streamed.

        Args:
            client_request: request to answer.
            replies: reply of each sample.
            bytes_of: function from a token id to its bytes.
        """

    def writer(self, client_request: ClientRequest, bytes_of: BytesOf) -> AnswerWriter:
        """Return the writer of a streamed answer. Arguments are those of `answer`."""

    def error(self, error: ClientError) -> dict[str, Any]:
        """Write an error as the body of a response."""


EVENTS = "text/event-stream; charset=utf-8"
"""Content type of server-sent events."""


class AnswerWriter(Protocol):
    """Writer of a streamed answer. The samples are interleaved: for each sample the pieces in order, then the end.
    Together they say the same as `Dialect.answer`. Any method may return no bytes.

    Attributes:
        content_type: content type of the stream.
    """

    content_type: str

    def begin(self, head: ReplyHead) -> bytes:
        """Write the beginning of the answer.

        Args:
            head: head of the reply that starts first.
        """

    def piece(self, sample: int, piece: ReplyPiece) -> bytes:
        """Write a piece of a reply."""

    def end(self, sample: int, reply: SampledReply) -> bytes:
        """Write the end of a reply, which is durable and whose pieces were all written."""

    def close(self) -> bytes:
        """Write the end of the answer."""

    def fail(self, error: ClientError) -> bytes:
        """Write an error that replaces the rest of the answer."""

    def ping(self) -> bytes:
        """Write a keep-alive event, which may come before the beginning."""


class BytesOf(Protocol):
    """Function from a token id to its bytes, which may be a part of a character."""

    def __call__(self, token: int) -> bytes:
        """Return the bytes."""


def to_json(data: Any) -> bytes:
    """Encode plain data as JSON in UTF-8; integers may have any size."""
    try:
        return msgspec.json.encode(data)
    except OverflowError:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def typed(data: Any, where: str, kind: type | tuple[type, ...], expected: str) -> Any:
    """Return a value of a request after a check of its type.

    Raises:
        BadInput: the value has another type.
    """
    if not isinstance(data, kind) or isinstance(data, bool) and kind is int:
        got = "nothing" if data is None else type(data).__name__
        raise refusal(where, expected, got, "correct the request")
    return data


def optional(values: Mapping[str, Any], name: str, kind: type, expected: str, default: Any, before: str = "") -> Any:
    """Return an optional value of a request, or the default.

    Args:
        values: values by name.
        name: name of the value.
        kind: required type.
        expected: description of the type, for the refusal.
        default: value if the request has none, or null.
        before: place of `values` in the request, with a dot at the end.

    Raises:
        BadInput: the value has another type.
    """
    value = values.get(name)
    return default if value is None else typed(value, f"{before}{name}", kind, expected)


def flag_in(values: Mapping[str, Any], name: str, before: str = "") -> bool:
    """Return an optional boolean of a request; the default is False.

    Raises:
        BadInput: the value is not a boolean.
    """
    return bool(optional(values, name, bool, "true or false", False, before))


def count_in(values: Mapping[str, Any], name: str, before: str = "") -> int | None:
    """Return an optional positive integer of a request.

    Raises:
        BadInput: the value is not an integer, or less than 1.
    """
    count: int | None = optional(values, name, int, "a whole number", None, before)
    if count is not None and count < 1:
        raise refusal(f"{before}{name}", "at least 1", str(count), "raise it")
    return count


def noted_fields(
    values: Mapping[str, Any], obeyed: frozenset[str], noted: frozenset[str], before: str = ""
) -> tuple[str, ...]:
    """Return the names of the fields that have no effect, each after the prefix `before`.

    Raises:
        BadInput: a field is in neither `obeyed` nor `noted`.
    """
    for name in sorted(values.keys() - obeyed - noted):
        if values[name] is not None:
            do = "leave it out; docs/harnesses.md says which fields have an effect"
            raise refusal(f"{before}{name}", "a field that can be obeyed", "one that cannot", do)
    return tuple(sorted(f"{before}{name}" for name in values.keys() & noted if values[name] is not None))


def is_left_out(kind: object, leave_out: Collection[str]) -> bool:
    """Return whether a door drops tools of this type: `leave_out` has the type, or the type without its date."""
    return isinstance(kind, str) and any(kind == name or kind.startswith(f"{name}_") for name in leave_out)


def texts_in(texts: Any, where: str) -> tuple[str, ...]:
    """Return an optional list of non-empty texts of a request.

    Raises:
        BadInput: the value is not such a list.
    """
    for text in typed([] if texts is None else texts, where, list, "a list of texts"):
        if not text_in(typed(text, where, str, "a list of texts"), where):
            raise refusal(where, "texts that are not empty", '""', "leave it out")
    return tuple(texts or ())


def noted_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the headers that ask for something that has no effect here."""
    return tuple(name for name in ("anthropic-beta", "openai-beta") if headers.get(name))


def call_of(id: str, name: str, arguments: str) -> ToolCall:
    """Return a call with arguments as JSON text. Arguments that do not parse make a malformed call. Empty text means no
    arguments, as in servers of this API."""
    if not arguments.strip():
        return ToolCall(id=id, name=name, arguments={})
    try:
        parsed = json.loads(arguments, parse_constant=_refuse_constant)
        if _ESCAPED_HALF.search(arguments.encode()) is not None:
            _check_surrogates(parsed)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        return ToolCall(id=id, name=name, arguments=None, raw=arguments)
    return ToolCall(id=id, name=name, arguments=parsed)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call as JSON; for a malformed call, the sampled text."""
    return call.raw if call.arguments is None else json.dumps(dict(call.arguments), ensure_ascii=False)


class Placed(NamedTuple):
    """Message of a conversation, and its place in the request, such as `input[1]`."""

    where: str
    message: Message


def order_answers(
    conversation: Sequence[Placed], field: str, system: str = "", *, replies_follow: bool = False
) -> tuple[Message, ...]:
    """Sort the answers to each reply's calls in the order of the calls, and check the conversation.

    Args:
        conversation: messages of the request.
        field: field of the conversation, for refusals.
        system: system message from a field of its own; empty if there is no such message.
        replies_follow: whether the vendor continues a conversation that ends with a reply by another reply.

    Raises:
        BadInput: the conversation is empty, an answer names no call of the reply before it, or the last message is a
            reply that cannot be followed by another or has unanswered calls.
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
    """Return a text if UTF-8 can encode it.

    Raises:
        BadInput: the text has half of a surrogate pair.
    """
    if value.isascii():  # a flag of the string, checked in constant time
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal(where, "text", f"half of a surrogate pair at {error.start}", "correct the request") from None
    return value


def name_in(value: Any, where: str) -> str:
    """Return the name of a tool.

    Raises:
        BadInput: the value is not a string, or empty.
    """
    if not typed(value, where, str, "a name"):
        raise refusal(where, "a name", '""', "name it")
    return text_in(value, where)


def length_text(too_long: tuple[int, int]) -> str:
    """Return the length of a prompt that was too long, as text for clients. A text that is far too long was only
    counted up to twice the room; its length is then given as "more than".

    Args:
        too_long: counted length and room.
    """
    length, room = too_long
    return f"more than {2 * room}" if tuple(too_long) == far(room) else str(length)


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Escape of half of a surrogate pair, with or without the other half."""


def _check_surrogates(value: Any) -> None:
    """Raise UnicodeEncodeError for data with half of a surrogate pair."""
    json.dumps(value, ensure_ascii=False).encode()


def body_of(data: bytes) -> dict[str, Any]:
    """Read the body of a request.

    Raises:
        BadInput: the body is not a JSON object in UTF-8; NaN and infinities are not JSON.
    """
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        body = _decode_slowly(data)
    if not isinstance(body, dict):
        raise refusal("body", "a JSON object", type(body).__name__, "correct the request")
    return body


def _decode_slowly(data: bytes) -> Any:
    """Read a body that the fast decoder refused, because a number exceeds a double or because the body is invalid.

    Raises:
        BadInput: see `body_of`.
    """
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        if _ESCAPED_HALF.search(data) is not None:
            _check_surrogates(body)
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
"""Content codings by their first bytes, for the refusal of compressed bodies."""
