"""`Connections`: HTTP/1.1 connections to one server, on one event loop. Torch-free.

A general HTTP client costs two to ten times as much processor time per turn. Here a connection has one request at a
time and stays open afterwards, `httptools` parses the answers, and only data that is read is copied.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import httpx

T = TypeVar("T")

KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
]
"""Socket options: an answer may take any time, but a dead host is detected within a minute."""

MOST_HEAD = 64 << 10
"""Maximum number of bytes of an answer's head."""

MOST_UNREAD = 256 << 10
"""Number of unread bytes of an answer above which no more bytes are read from the socket, so that the server waits."""


PIECE = 1 << 20
"""Number of bytes of a request that are handed to the socket at a time."""


class ConnectError(OSError):
    """No connection to the server could be opened."""


class Connections:
    """Connections to one server, opened as requests need them and kept for later requests.

    Args:
        url: `http://host:port/path`, `https://...`, or `unix:path` for a socket.
        tls: certificates to trust, for `https`; None: the certificates that httpx trusts.

    Raises:
        ValueError: the URL has another form.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], *, connect_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket_path = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit("http://engine" if self._socket_path else url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://HOST:PORT, https://HOST:PORT or unix:PATH, got {url!r}")
        self._tls = (tls or httpx.create_ssl_context()) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._path, self._connect_s = parts.path.rstrip("/"), connect_s
        lines = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._closed = False

    async def post(self, path: str, body: bytes, large: Sequence[memoryview] = ()) -> HttpAnswer:
        """Send a request to the server's URL with `path` appended, and return the answer when its head has arrived. A
        cancelled request closes its connection. `large` follows `body` in the request's body, and is not copied.

        A server may close a kept connection just as a request is sent. Then no byte of an answer arrives, and the
        request is sent again on a new connection.

        Raises:
            ConnectError: the server cannot be reached.
            OSError: the server closed the connection before the head.
            ValueError: the answer is not HTTP.
        """
        return await self._send("POST", path, body, large)

    async def get(self, path: str) -> HttpAnswer:
        """Send a request without a body, as `post`."""
        return await self._send("GET", path, b"")

    async def _send(self, method: str, path: str, body: bytes, large: Sequence[memoryview] = ()) -> HttpAnswer:
        line = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        length = len(body) + sum(map(len, large))
        data = b"%b%bcontent-length: %d\r\n\r\n%b" % (line, self._head, length, body)
        if self._idle:
            connection = self._idle.pop()
            try:
                return await connection.ask(data, large)
            except OSError:
                if connection.heard:
                    raise
        connection = await self._connect()
        return await connection.ask(data, large)

    def close(self) -> None:
        """Close all connections. Their requests fail."""
        self._closed = True
        for connection in tuple(self._open):
            connection.drop(ConnectionAbortedError("this client was closed"))

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for the next request."""
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> _Connection:
        if self._closed:
            raise ConnectionAbortedError("this client was closed")
        loop, protocol = asyncio.get_running_loop(), partial(_Connection, self)
        try:
            async with asyncio.timeout(self._connect_s):
                if self._socket_path is not None:
                    _, connection = await loop.create_unix_connection(protocol, self._socket_path)
                else:
                    _, connection = await loop.create_connection(protocol, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise ConnectError(str(error) or f"no connection within {self._connect_s:g} s") from error
        except OSError as error:
            raise ConnectError(str(error)) from error
        self._open.add(connection)
        if self._closed:
            connection.drop(ConnectionAbortedError("this client was closed"))
        return connection


class HttpAnswer:
    """Answer to one request, whose head has arrived; names of headers are in lower case."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[str, str]) -> None:
        self._connection: _Connection | None = connection
        self.status, self.headers = status, headers

    def __enter__(self) -> HttpAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the connection back; close it if the answer has not ended, so that the server drops the request."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they arrive. Raises OSError if the connection was closed before the end of the
        answer. Raises ValueError if the answer is not HTTP."""
        while self._connection is not None:
            if piece := self._connection.take():
                yield piece
            elif self._connection.complete:
                return
            else:
                await self._connection.news()

    async def read(self, most: int | None = None) -> bytes:
        """Return the whole body. Raises as `pieces`, and ValueError if it is longer than `most` bytes."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if most is not None and len(body) > most:
                raise ValueError(f"expected an answer of at most {most} bytes, got more")
        return bytes(body)


class _Connection(asyncio.Protocol):
    """One connection and the answer that it is receiving.

    Attributes:
        heard: whether a byte of the answer has arrived.
        complete: whether the whole answer has arrived.
    """

    _transport: asyncio.Transport

    def __init__(self, owner: Connections) -> None:
        """Set up a connection of `owner`."""
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self._asked, self._reusable = False, True
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin()

    def _begin(self) -> None:
        """Reset the state of the previous answer."""
        self._status, self._headers = 0, dict[str, str]()
        self._head_bytes, self._paused = 0, False
        self._unread: list[bytes] = []
        self._num_unread = 0
        self.heard = self.complete = self._headed = False

    async def ask(self, data: bytes, large: Sequence[memoryview] = ()) -> HttpAnswer:
        """Send a request and wait for the head of its answer. Raises as `Connections.post`."""
        self._begin()
        self._asked, self._reusable = True, False
        try:
            for part in (memoryview(data), *large):
                for start in range(0, len(part), PIECE):
                    await self._writable.wait()
                    if self._lost is None:
                        self._transport.write(part[start : start + PIECE])
            while not self._headed:
                await self.news()
        except BaseException:
            self._transport.abort()
            raise
        return HttpAnswer(self, self._status, self._headers)

    async def news(self) -> None:
        """Wait until more of the answer has arrived. Raises as `HttpAnswer.pieces`."""
        if self._lost is not None:
            raise self._lost
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """Return the bytes of the body that have arrived since the last call."""
        if not self._unread:
            return b""
        taken = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        self._num_unread = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return taken

    def end(self) -> None:
        """Keep the connection for another request if the whole answer has arrived, else close the connection."""
        self.take()
        self._asked = False
        if self.complete and self._reusable and not self._transport.is_closing():
            self._begin()
            self._owner.keep(self)
        else:
            self._transport.abort()

    def drop(self, reason: Exception) -> None:
        """Close the connection. Its request fails with `reason`."""
        self._lost = self._lost or reason
        self._transport.abort()
        self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the options of the socket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            for option in KEEP_ALIVE:
                connected.setsockopt(*option)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if not self._asked:  # nobody asked: the next answer would not be to its request
            self._transport.abort()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
            if not self._headed:
                self._head_bytes += len(data)
                if self._head_bytes > MOST_HEAD:
                    self.drop(ValueError(f"expected a head of at most {MOST_HEAD} bytes, got more"))
        except httptools.HttpParserUpgrade:
            self.drop(ValueError("expected an answer, got a change of protocol"))
        except httptools.HttpParserError:
            self.drop(ValueError(f"expected HTTP, got {data[:60]!r}"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer. An answer without a length ends here; any other one fails if it is incomplete."""
        if self._headed and not self.complete and exc is None and self._ends_with_connection():
            self.complete, self._reusable = True, False
        self._lost = self._lost or exc or ConnectionResetError("the server closed the connection")
        self._writable.set()
        self._owner.forget(self)
        self._wake()

    def pause_writing(self) -> None:
        """Let a large body wait for the server."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let a large body go on."""
        self._writable.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is ignored."""
        if not self._headed:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the end of the head."""
        self._status = self._parser.get_status_code()
        if self._status < 200:  # an interim answer, before the real one
            self._headers = {}
        else:
            self._headed = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._unread.append(body)
        self._num_unread += len(body)
        if self._num_unread > MOST_UNREAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_begin(self) -> None:
        """Refuse a second answer to one request; its connection is not used again."""
        if self.complete:
            raise ValueError("expected one answer, got two")

    def on_message_complete(self) -> None:
        """Take the end of the answer."""
        if self._headed:
            self.complete, self._reusable = True, self._parser.should_keep_alive()

    def _ends_with_connection(self) -> bool:
        """Return whether the head has no length of the body, which then ends with the connection."""
        return not {"content-length", "transfer-encoding"} & self._headers.keys()

    def _wake(self) -> None:
        """Wake the request that waits for more of its answer."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new thread with its own event loop, so that the caller may be on a loop. Return its
    result."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
