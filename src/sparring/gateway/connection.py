"""HTTP responses that send the answer of an exchange, whole or streamed, while the client stays connected."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.errors import SparringError
from sparring.gateway.client_protocol import WHEN_BROKEN
from sparring.gateway.dialects.dialect import AnswerWriter, BytesOf, ClientRequest, Dialect
from sparring.gateway.dialects.fields import to_json
from sparring.gateway.exchange import Exchange
from sparring.gateway.refusals import client_error, refusal_response
from sparring.reply import ReplyHead, ReplyPart, SampledReply
from sparring.types import Message

T = TypeVar("T")
PING_S = 10.0
"""Default interval of keep-alive events on a stream, in seconds; a session's endpoint may set another."""


class Connection:
    """Reader of an exchange, from its beginning, for one client's connection while the context lasts.

    Attributes:
        exchange: exchange that is read.
        delivered: whether the client received the complete answer.
    """

    def __init__(self, exchange: Exchange, receive: Receive) -> None:
        self.exchange = exchange
        self.delivered = False
        self._ended = False
        self._read = 0
        self._waiting: asyncio.Future[None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._disconnected = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
        self._disconnected.add_done_callback(lambda _: self._wake())

    def __enter__(self) -> Connection:
        self.exchange.wakers.add(self._wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnected.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.leave()

    def leave(self) -> None:
        """Stop reading, and record whether the answer was delivered. Later calls have no effect."""
        if not self._ended:
            self._ended = True
            self.exchange.wakers.discard(self._wake)
            self.exchange.deliver(self.delivered)
            self._wake()

    async def parts(self, patience_s: float | None = None) -> Sequence[tuple[int, ReplyPart]]:
        """Return the parts that arrived since the last call; empty if `patience_s` passed first or the exchange is
        over.

        Raises:
            ClientDisconnect: the client left.
        """
        exchange = self.exchange
        if self._read == len(exchange.parts) and not exchange.over and not self._has_left:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            if patience_s is not None:
                self._deadline = loop.time() + patience_s
                if self._timer is None:  # one timer for many waits, since parts come a thousand times as often
                    self._timer = loop.call_at(self._deadline, self._time_out)
            await self._waiting
        self.check()
        new = exchange.parts[self._read :]
        self._read += len(new)
        return new

    async def whole(self) -> list[SampledReply]:
        """Wait for the complete replies and return them.

        Raises:
            ClientDisconnect: the client left.
            SparringError: the exchange failed.
        """
        while not self.exchange.over:
            await self.parts()
        return self.exchange.whole

    def check(self) -> None:
        """Raise ClientDisconnect if the client has left."""
        if self._has_left:
            raise ClientDisconnect

    @property
    def _has_left(self) -> bool:
        return self._ended or self._disconnected.done()

    def _time_out(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._time_out)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class ExchangeResponse(Response):
    """Response to one request: an exchange in the client's dialect, streamed if the client asked for a stream.

    Args:
        ping_s: interval of keep-alive events on a stream, in seconds.
    """

    def __init__(
        self,
        exchange: Exchange,
        dialect: Dialect,
        client_request: ClientRequest,
        bytes_of: BytesOf,
        *,
        headers: Mapping[str, str],
        ping_s: float = PING_S,
    ) -> None:
        self._exchange, self._dialect = exchange, dialect
        self._client_request, self._bytes_of = client_request, bytes_of
        self._more_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._ping_s, self._sent = ping_s, False
        self._connection: Connection | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until it is complete or the client leaves."""
        scope[WHEN_BROKEN] = self._when_broken
        try:
            with Connection(self._exchange, receive) as connection:
                self._connection = connection
                await (self._stream if self._client_request.stream else self._send)(connection, send)
                self._sent = connection.delivered
        except ClientDisconnect:
            return
        except SparringError as error:
            await refusal_response(self._dialect, error)(scope, receive, send)

    def _when_broken(self) -> None:
        """Record that the client left: before the end of the answer, or after that, when delivery is unknown."""
        if self._sent:
            self._exchange.deliver(None)
        elif self._connection is not None:
            self._connection.leave()

    async def _send(self, connection: Connection, send: Send) -> None:
        replies = await connection.whole()
        body = to_json(self._dialect.answer(self._client_request, replies, self._bytes_of))
        await self._start(send, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        connection.check()
        await send({"type": "http.response.body", "body": body})
        connection.delivered = True

    async def _stream(self, connection: Connection, send: Send) -> None:
        """Send the answer as events. Raises SparringError if the exchange failed before its first part."""
        exchange = connection.exchange
        writer = self._dialect.writer(self._client_request, self._bytes_of)
        parts = await connection.parts(self._ping_s)
        if not parts and exchange.error is not None:
            raise exchange.error
        await self._start(send, [(b"content-type", writer.content_type.encode())])
        begun = False
        while parts or not exchange.over:
            data = b"" if parts else writer.ping()
            for sample, part in parts:
                data += _write_part(writer, sample, part, begun)
                begun = True
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            parts = await connection.parts(self._ping_s)
        last = writer.close() if exchange.error is None else writer.fail(client_error(exchange.error))
        connection.check()
        await send({"type": "http.response.body", "body": last})
        connection.delivered = exchange.error is None

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._more_headers]})


def empty_response(dialect: Dialect, client_request: ClientRequest, id: str, headers: Mapping[str, str]) -> Response:
    """Return the response to a request that samples nothing: an empty reply in the client's dialect.

    Args:
        id: id by which a later request continues the conversation.
    """
    reply = SampledReply(
        id=id,
        message=Message(role="assistant"),
        finish_reason="stop",
        prompt_tokens=0,
        cached_tokens=0,
        tokens=(),
        logprobs=(),
        reasoning_tokens=0,
    )
    if not client_request.stream:
        body = to_json(dialect.answer(client_request, [reply], _no_bytes))
        return Response(body, media_type="application/json", headers=headers)
    writer = dialect.writer(client_request, _no_bytes)
    events = writer.begin(ReplyHead(id=id, prompt_tokens=0)) + writer.end(0, reply) + writer.close()
    return Response(events, media_type=writer.content_type, headers=headers)


async def while_connected(receive: Receive, answering: asyncio.Future[T]) -> T:
    """Wait for the result of `answering`, and cancel it if the client leaves first. Called after the body of the
    request has been read.

    Raises:
        ClientDisconnect: the client left.
    """
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


def _write_part(writer: AnswerWriter, sample: int, part: ReplyPart, begun: bool) -> bytes:
    """Write a part of an exchange as events. Of several heads only the first is written."""
    if isinstance(part, ReplyHead):
        return b"" if begun else writer.begin(part)
    if isinstance(part, SampledReply):
        return writer.end(sample, part)
    return writer.piece(sample, part)


def _no_bytes(token: int) -> bytes:
    return b""


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
