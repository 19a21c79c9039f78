"""Readers of request bodies, with limits on their size that hold before anything is converted or rendered.

A body is read only under a valid key, up to `MOST_BYTES`; the JSON values are counted in its bytes; and a text is
refused as too long if no prompt of the context can hold it, even with the vocabulary's longest ids. Large bodies are
read in a thread, in the order in which the requests of a session arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from sparring.errors import LimitReached, refusal
from sparring.gateway.dialects.dialect import ClientCall, ClientRequest, Dialect
from sparring.gateway.dialects.fields import body_of
from sparring.gateway.dialects.responses import replies_named
from sparring.gateway.exchange import Exchanges, request_digest
from sparring.gateway.refusals import read_request
from sparring.record.rendering import in_thread
from sparring.record.request import far
from sparring.types import Message, ToolSpec

T = TypeVar("T")
Body = bytes

MOST_BYTES = 8 << 20
"""Maximum number of bytes of a request, whatever the context."""

MOST_VALUES = 1 << 17
"""Maximum number of JSON values of a request, containers and keys included, whatever the context."""

VALUES = 4
"""JSON values that a request may have per id of the context. A value that the template writes takes at least one id;
other values, such as cache marks and titles of a schema, are left out of the prompt."""

VALUES_BESIDE = 4096
"""JSON values that a request may have in addition, so that the tools of an agent program fit even if the context is
small."""

MUCH_BYTES, MUCH_VALUES = 128 << 10, 8192
"""Numbers of bytes and of JSON values above which a request is read in a thread."""

_OPENS = b",[{:"


class Overflow(LimitReached):
    """Refusal of a request that is far too long for the context."""

    def __init__(self, what: str, context: int) -> None:
        text = f"a prompt of more than {2 * context} tokens ({what}), room for {context}"
        super().__init__("context_length", text, far(context))


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Maximum size of a prompt of a session.

    Attributes:
        context: maximum number of ids of a prompt and its reply.
        bytes: maximum number of bytes of a text of `context` ids.
    """

    context: int
    bytes: int

    @property
    def values(self) -> int:
        """Maximum number of JSON values of a request."""
        return min(MOST_VALUES, VALUES * self.context + VALUES_BESIDE)

    def overflow(self, what: str) -> Overflow:
        """Return the refusal of a request that is far too long; `what` describes the excess."""
        return Overflow(what, self.context)

    def check(self, data: Body) -> None:
        """Check an undecoded body.

        Raises:
            Overflow: the body has too many values.
            BadInput: the body is large and cannot be a JSON object.
        """
        if len(data) > MUCH_VALUES and not data[:64].lstrip().startswith(b"{"):
            raise refusal("body", "a JSON object", "something else", "correct the request")
        if has_more(data, self.values):
            raise self.overflow(f"more than {self.values} values")

    def check_text(self, body: Any, data: Body) -> None:
        """Check the length of the text in a body, without the escapes of JSON.

        Raises:
            Overflow: the text is longer than any prompt of this context.
        """
        if len(data) > self.bytes and _text_in(body) > self.bytes:
            raise self.overflow(f"more than {self.bytes} bytes of text")

    def check_rendered(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Check the number of elements that a template writes, since templates are slow on long lists.

        A message counts as two ids, a key or a value of a call as one, and of a schema as half an id, since a template
        may skip parts of a schema.

        Raises:
            Overflow: messages, values of calls, or values of schemas take more ids than the context has.
        """
        if 2 * len(messages) > self.context:
            raise self.overflow(f"{len(messages)} messages")
        schemas = (tool.parameters for tool in tools)
        arguments = (call.arguments for message in messages for call in message.tool_calls)
        if sum(map(_num_values, arguments)) > self.context or sum(map(_num_values, schemas)) > 2 * self.context:
            raise self.overflow("the values in tools and calls")


async def read_body(request: Request, most_bytes: int, over: Callable[[], Exception] | None = None) -> bytes:
    """Read the body of a request.

    Args:
        over: function that makes the error for a larger body; None: `BadInput` is raised.

    Raises:
        BadInput: the body is larger than `most_bytes`.
        ClientDisconnect: the client left before the end.
    """
    data = bytearray()
    announced = next((value for name, value in request.scope["headers"] if name == b"content-length"), b"")
    too_large = announced.isdigit() and int(announced[:12]) > most_bytes
    while not too_large:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        too_large = len(data) + len(piece) > most_bytes
        if not too_large and not message.get("more_body", False):
            return bytes(data + piece) if data else piece  # nearly all bodies arrive in one piece
        data += piece
    raise refusal("body", f"at most {most_bytes} bytes", "more", "send less") if over is None else over()


def read_form(body: Mapping[str, Any], form: type[T], expected: str) -> T:
    """Read a body of a given type.

    Raises:
        BadInput: the body does not have this type.
    """
    try:
        return msgspec.convert(body, form)
    except (msgspec.ValidationError, OverflowError) as error:
        raise refusal("body", expected, str(error), "correct the request") from None


async def read_tool_call(request: Request, room: Room) -> bytes:
    """Read the body of a request to the tools of a world. Raises BadInput if longer than any reply of the context."""
    most = min(MOST_BYTES, room.bytes + VALUES_BESIDE)
    data = await read_body(request, most)
    if has_more(data, room.context + VALUES_BESIDE):
        expected = f"a call of at most {room.context + VALUES_BESIDE} values"
        raise refusal("body", expected, "more", "send what a reply of the model holds")
    return data


class CallReader:
    """Reader of one client's requests for replies, in order of arrival.

    Args:
        room: maximum size of a prompt.
        exchanges: exchanges of the client's requests, whose conversations a request may continue.
        leave_out: types of vendor-hosted tools that are dropped from requests instead of refused.
    """

    def __init__(self, room: Room, exchanges: Exchanges, leave_out: frozenset[str]) -> None:
        self._room, self._exchanges, self._leave_out = room, exchanges, leave_out
        self._reading = asyncio.Lock()

    async def read(self, dialect: Dialect, request: Request) -> tuple[ClientRequest, bytes]:
        """Read a client's request. Return the request and its digest (`request_digest`).

        Raises:
            BadInput: the request is refused.
            Overflow: the request is far too long.
            ClientDisconnect: the client left before the end.
        """
        room = self._room
        data = await read_body(request, MOST_BYTES, lambda: room.overflow(f"more than {MOST_BYTES} bytes"))
        room.check(data)
        values = values_at_most(data)
        beside = len(data) > MUCH_BYTES or values > MUCH_VALUES
        async with self._reading:
            body = await _run(beside, _decode, data, room)
            call = ClientCall(
                body=body,
                headers={
                    name.decode("latin-1"): value.decode("latin-1")
                    for name, value in reversed(request.scope["headers"])
                },
                path=request.path_params,
                query=request.query_params if request.scope["query_string"] else {},
                leave_out=self._leave_out,
                conversation=self._exchanges.conversations(replies_named(body)).get,
            )
            return await _run(beside, _read, dialect, call, room if values > room.context else None)


def values_at_most(data: bytes) -> int:
    """Return an upper bound of the number of JSON values. For short data the bound is the number of bytes, because
    counting would take longer than reading."""
    return len(data) if len(data) <= MUCH_VALUES else _count_marks(data)


def has_more(data: bytes, most: int) -> bool:
    """Return whether JSON has more than `most` values: containers, keys and elements. Nothing is decoded, and commas
    inside strings do not count."""
    if len(data) <= most or _count_marks(data) <= most:
        return False
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return bare.count(b'"') > 2 * most or _count_marks(b"".join(bare.split(b'"')[::2])) > most


def _count_marks(data: bytes) -> int:
    return len(data) - len(data.translate(None, _OPENS))  # takes half the time of four counts


def _decode(data: bytes, room: Room) -> dict[str, Any]:
    body = body_of(data)
    room.check_text(body, data)
    return body


def _read(dialect: Dialect, call: ClientCall, room: Room | None) -> tuple[ClientRequest, bytes]:
    """Read a call in its dialect. `room` is given if the call may have more values than its context has ids."""
    wanted = read_request(dialect, call)
    if room is not None:
        room.check_rendered(wanted.messages, wanted.tools)
    return wanted, request_digest(f"{dialect.path} {wanted.model}", call.body, wanted)


async def _run(beside: bool, work: Callable[..., T], *arguments: Any) -> T:
    return await in_thread(work, *arguments) if beside else work(*arguments)


def _num_values(value: Any) -> int:
    number, waiting = 0, [value]
    while waiting:
        inner = waiting.pop()
        number += 1
        if isinstance(inner, Mapping):
            number += len(inner)
            waiting += inner.values()
        elif isinstance(inner, (list, tuple)):
            waiting += inner
    return number


def _text_in(value: Any) -> int:
    """Return the number of bytes of all texts, keys and numbers in plain data."""
    number, waiting = 0, [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, str):
            number += len(inner.encode("utf-8", "surrogatepass"))
        elif isinstance(inner, dict):
            waiting += inner
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
        elif isinstance(inner, float):
            number += 3
        elif isinstance(inner, int):
            number += inner.bit_length() // 4 + 1
    return number
