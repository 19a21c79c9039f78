"""Reading of requests, bounded by what a prompt may have before anything of it is converted or rendered.

A body is read under a key alone, up to `MOST_BYTES`; its values are counted in its bytes; and text that no prompt of
the context has, even if every id were the vocabulary's longest, is refused as too long. What takes longer than a moment
is done beside the event loop, in the order in which the requests of a door came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from sparring.errors import LimitReached, refusal
from sparring.gateway.dialects.dialect import ClientCall, ClientRequest, Dialect, body_of
from sparring.gateway.dialects.responses import replies_named
from sparring.gateway.exchange import Exchanges, request_digest
from sparring.gateway.models import ModelTable
from sparring.gateway.refusals import read_request
from sparring.record.rendering import apart
from sparring.record.request import far
from sparring.types import Message, ToolSpec

T = TypeVar("T")

MOST_BYTES = 8 << 20
"""Largest body of a request, whatever the context."""

MOST_VALUES = 1 << 17
"""Most values of a request's JSON, containers and keys included, whatever the context."""

VALUES = 4
"""Values of a request for each id of the context. What a template writes of one takes an id at least; beside these
there are some that it leaves out, such as marks for caches and titles of a schema."""

VALUES_BESIDE = 4096
"""Values of a request that the smallest context has to bear: the tools of a program."""

MUCH_BYTES, MUCH_VALUES = 128 << 10, 8192
"""Size of a request from which on it is read beside the event loop."""

_OPENS = b",[{:"


class Overflow(LimitReached):
    """A request is too long by far for the context: it is refused unread."""

    def __init__(self, what: str, context: int) -> None:
        text = f"a prompt of more than {2 * context} tokens ({what}), room for {context}"
        super().__init__("context_length", text, far(context))


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Room that a prompt of a session has.

    Attributes:
        context: most ids of a prompt and its reply.
        bytes: most that the text of so many ids may have.
    """

    context: int
    bytes: int

    @property
    def values(self) -> int:
        """Most values of a request."""
        return min(MOST_VALUES, VALUES * self.context + VALUES_BESIDE)

    def overflow(self, what: str) -> Overflow:
        """Return the refusal of a request."""
        return Overflow(what, self.context)

    def check(self, data: bytes) -> None:
        """Refuse a body by its bytes alone. Raises Overflow where it has too many values, BadInput where it is large
        and cannot be an object."""
        if len(data) > MUCH_VALUES and not data[:64].lstrip().startswith(b"{"):
            raise refusal("body", "a JSON object", "something else", "correct the request")
        if has_more(data, self.values):
            raise self.overflow(f"more than {self.values} values")

    def check_text(self, body: Any, data: bytes) -> None:
        """Refuse a body by the text in it, which escapes may have made longer than it is.

        Args:
            body: as it was decoded.
            data: its bytes.

        Raises:
            Overflow: no prompt of this context has so much.
        """
        if len(data) > self.bytes and _text_in(body) > self.bytes:
            raise self.overflow(f"more than {self.bytes} bytes of text")

    def check_rendered(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Refuse a conversation by the number of what a template writes: a message has two ids at least, a key and a
        value of a call one each; of a schema some may be left out. Templates take long over them. Raises Overflow."""
        if 2 * len(messages) > self.context:
            raise self.overflow(f"{len(messages)} messages")
        schemas = (tool.parameters for tool in tools)
        arguments = (call.arguments for message in messages for call in message.tool_calls)
        if sum(map(_num_values, arguments)) > self.context or sum(map(_num_values, schemas)) > 2 * self.context:
            raise self.overflow("the values in tools and calls")


class ReadDoor(Protocol):
    """Part of a door that requests are read by: see the attributes of `server.Door`."""

    models: ModelTable[Any]
    leave_out: frozenset[str]
    exchanges: Exchanges
    room: Room
    reading: asyncio.Lock


async def read_body(request: Request, most_bytes: int, over: Callable[[], Exception] | None = None) -> bytes:
    """Return the body of a request.

    Args:
        request: whose key is known.
        most_bytes: of the body.
        over: makes the error of a larger one; None: a refusal.

    Raises:
        BadInput: it is larger than `most_bytes`.
        ClientDisconnect: the client left before its end.
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
            return bytes(data + piece) if data else piece  # nearly all come in one piece
        data += piece
    raise refusal("body", f"at most {most_bytes} bytes", "more", "send less") if over is None else over()


async def read_prompt(request: Request, room: Room) -> bytes:
    """Return the body of a request for a reply. Raises Overflow where no prompt of the context is so large."""
    data = await read_body(request, MOST_BYTES, lambda: room.overflow(f"more than {MOST_BYTES} bytes"))
    room.check(data)
    return data


async def read_tool_call(request: Request, room: Room) -> bytes:
    """Return the body of a request to a world's tools. Raises BadInput where no reply of the context holds so much."""
    most = min(MOST_BYTES, room.bytes + VALUES_BESIDE)
    data = await read_body(request, most)
    if has_more(data, room.context + VALUES_BESIDE):
        expected = f"a call of at most {room.context + VALUES_BESIDE} values"
        raise refusal("body", expected, "more", "send what a reply of the model holds")
    return data


async def read_call(dialect: Dialect, request: Request, door: ReadDoor) -> tuple[ClientRequest, bytes]:
    """Return what a client asks for, and its digest; see `request_digest`.

    Raises:
        BadInput: the request is refused.
        Overflow: it is too long by far.
    """
    data = await read_prompt(request, door.room)
    values = values_at_most(data)
    beside = len(data) > MUCH_BYTES or values > MUCH_VALUES
    async with door.reading:
        body = await _done(beside, _decoded, data, door.room)
        named = replies_named(body)
        earlier = await door.exchanges.conversations(door.models, named) if named else {}
        call = ClientCall(
            body=body,
            headers={
                name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.scope["headers"])
            },
            path=request.path_params,
            query=request.query_params if request.scope["query_string"] else {},
            leave_out=door.leave_out,
            conversation=earlier.get,
        )
        return await _done(beside, _read, dialect, call, door.room if values > door.room.context else None)


def values_at_most(data: bytes) -> int:
    """Return a number than which JSON has no more values, text not looked into: of a short one its length, since
    counting takes longer than reading it."""
    return len(data) if len(data) <= MUCH_VALUES else _marks(data)


def has_more(data: bytes, most: int) -> bool:
    """Return whether JSON has more values than `most`: containers, keys and what stands between commas. Text is not
    looked into, and nothing is converted."""
    if len(data) <= most or _marks(data) <= most:
        return False
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return bare.count(b'"') > 2 * most or _marks(b"".join(bare.split(b'"')[::2])) > most


def _marks(data: bytes) -> int:
    return len(data) - len(data.translate(None, _OPENS))  # in half the time of four counts


def _decoded(data: bytes, room: Room) -> dict[str, Any]:
    body = body_of(data)
    room.check_text(body, data)
    return body


def _read(dialect: Dialect, call: ClientCall, room: Room | None) -> tuple[ClientRequest, bytes]:
    """Read a call; `room`: of one that may have more values than its context has ids."""
    wanted = read_request(dialect, call)
    if room is not None:
        room.check_rendered(wanted.messages, wanted.tools)
    return wanted, request_digest(f"{dialect.path} {wanted.model}", call.body, wanted)


async def _done(beside: bool, work: Callable[..., T], *arguments: Any) -> T:
    return await apart(work, *arguments) if beside else work(*arguments)


def _num_values(value: Any) -> int:
    """Count plain data: values, containers and keys."""
    number, left = 0, [value]
    while left:
        inner = left.pop()
        number += 1
        if isinstance(inner, Mapping):
            number += len(inner)
            left += inner.values()
        elif isinstance(inner, (list, tuple)):
            left += inner
    return number


def _text_in(value: Any) -> int:
    """Return the bytes of all texts, keys and numbers of plain data."""
    number, left = 0, [value]
    while left:
        inner = left.pop()
        if isinstance(inner, str):
            number += len(inner.encode("utf-8", "surrogatepass"))
        elif isinstance(inner, dict):
            left += inner
            left += inner.values()
        elif isinstance(inner, list):
            left += inner
        elif isinstance(inner, float):
            number += 3
        elif isinstance(inner, int):
            number += inner.bit_length() // 4 + 1
    return number
