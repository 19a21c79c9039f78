"""Connections: an exchange is sent to a client as it comes, for as long as the client stays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.errors import SparringError
from sparring.gateway.dialects.dialect import AnswerWriter, BytesOf, ClientRequest, Dialect, encoded
from sparring.gateway.exchange import Exchange
from sparring.gateway.refusals import client_error, refused
from sparring.gateway.serving import WHEN_BROKEN
from sparring.reply import ReplyHead, ReplyPart, SampledReply
from sparring.types import Message

T = TypeVar("T")
PING_S = 10.0
"""Seconds after which a client that waits for events is sent one that says nothing, unless its door says another
number."""


class Connection:
    """Connection of one client, which reads an exchange from its beginning while the context lasts.

    Attributes:
        exchange: what is read.
        delivered: whether the client got the answer to its end.
    """

    def __init__(self, exchange: Exchange, receive: Receive) -> None:
        self.exchange = exchange
        self.delivered = False
        self._there = True
        self._read = 0
        self._waiting: asyncio.Future[None] | None = None
        self._patient_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = asyncio.get_running_loop().create_task(_left(receive))
        self._leaving.add_done_callback(lambda _: self._wake())

    def __enter__(self) -> Connection:
        self.exchange.wakers.add(self._wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.leave()

    def leave(self) -> None:
        """Stop reading, and take note of whether the answer was delivered."""
        if self._there:
            self._there = False
            self.exchange.wakers.discard(self._wake)
            self.exchange.deliver(self.delivered)
            self._wake()

    async def parts(self, patience_s: float | None = None) -> Sequence[tuple[int, ReplyPart]]:
        """Return the parts that were not read yet; none where none come in time, or the exchange is over.

        Raises:
            ClientDisconnect: the client left.
        """
        exchange = self.exchange
        if self._read == len(exchange.parts) and not exchange.over and self._there and not self._leaving.done():
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            if patience_s is not None:
                self._patient_until = loop.time() + patience_s
                if self._timer is None:  # one for many waits: parts come a thousand times as often
                    self._timer = loop.call_at(self._patient_until, self._lose_patience)
            await self._waiting
        self.check()
        new = exchange.parts[self._read :]
        self._read += len(new)
        return new

    async def whole(self) -> list[SampledReply]:
        """Return the replies when they are whole.

        Raises:
            ClientDisconnect: the client left.
            SparringError: there are none.
        """
        while not self.exchange.over:
            await self.parts()
        return self.exchange.whole

    def check(self) -> None:
        """Raise ClientDisconnect if the client has left."""
        if self._leaving.done() or not self._there:
            raise ClientDisconnect

    def _lose_patience(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if loop.time() < self._patient_until:
            self._timer = loop.call_at(self._patient_until, self._lose_patience)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class ExchangeResponse(Response):
    """Answer to one request: an exchange in the words of a dialect, sent as it comes where the client wants that.

    Args:
        exchange: what is sent.
        dialect: of the client.
        client_request: what it asked for.
        bytes_of: ids to bytes.
        headers: of the answer.
        ping_s: seconds after which a client that waits for events is sent one that says nothing.
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
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._ping_s, self._sent = ping_s, False
        self._connection: Connection | None = None
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer for as long as the client stays."""
        scope[WHEN_BROKEN] = self._when_broken
        try:
            with Connection(self._exchange, receive) as connection:
                self._connection = connection
                await (self._stream if self._client_request.stream else self._send)(connection, send)
                self._sent = connection.delivered
        except ClientDisconnect:
            return
        except SparringError as error:
            await refused(self._dialect, error)(scope, receive, send)

    def _when_broken(self) -> None:
        """Take note that the client has left: whether it read an answer that was sent to its end, nobody knows."""
        if self._sent:
            self._exchange.deliver(None)
        elif self._connection is not None:
            self._connection.leave()

    async def _send(self, connection: Connection, send: Send) -> None:
        """Send a whole answer. Raises SparringError where there is none."""
        replies = await connection.whole()
        body = encoded(self._dialect.answer(self._client_request, replies, self._bytes_of))
        await self._start(send, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        connection.check()
        await send({"type": "http.response.body", "body": body})
        connection.delivered = True

    async def _stream(self, connection: Connection, send: Send) -> None:
        """Send events. Raises SparringError where there is no answer, and none was begun."""
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
                data += _written(writer, sample, part, begun)
                begun = True
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            parts = await connection.parts(self._ping_s)
        last = writer.close() if exchange.error is None else writer.fail(client_error(exchange.error))
        connection.check()
        await send({"type": "http.response.body", "body": last})
        connection.delivered = exchange.error is None

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._headers]})


async def while_there(receive: Receive, answering: asyncio.Future[T]) -> T:
    """Return what answers a request whose body was read; it is cancelled when the client leaves before.

    Raises:
        ClientDisconnect: the client left.
    """
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


def _written(writer: AnswerWriter, sample: int, part: ReplyPart, begun: bool) -> bytes:
    """Return a part of an exchange as events. Only the first head is written."""
    if isinstance(part, ReplyHead):
        return b"" if begun else writer.begin(part)
    if isinstance(part, SampledReply):
        return writer.end(sample, part)
    return writer.piece(sample, part)


async def _left(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def unsampled(dialect: Dialect, client_request: ClientRequest, id: str, headers: Mapping[str, str]) -> Response:
    """Return the answer to a request for which nothing is sampled.

    Args:
        dialect: of the request.
        client_request: as it was read.
        id: by which a later request continues it.
        headers: of the answer.
    """

    def bytes_of(token: int) -> bytes:
        return b""

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
        body = encoded(dialect.answer(client_request, [reply], bytes_of))
        return Response(body, media_type="application/json", headers=headers)
    writer = dialect.writer(client_request, bytes_of)
    events = writer.begin(ReplyHead(id=reply.id, prompt_tokens=0)) + writer.end(0, reply) + writer.close()
    return Response(events, media_type=writer.content_type, headers=headers)
