"""Connection of an untrusted client, with limits on the size and time of its requests.

uvicorn and its parser limit neither the size of a request's head nor its time, and log a line for each bad request.
Here a head has at most `MOST_HEAD` bytes; heads and bodies have the time limits of `Patience`; and refusals are logged
once per kind and counted.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MOST_HEAD = 64 << 10
"""Maximum number of bytes of a request's head (its line and headers), and of its trailers."""

MOST_SENT = 16 << 20
"""Default of the maximum number of bytes of one request on the wire, chunk sizes included. Endpoints accept less."""

MOST_WAITING = 16
"""Maximum number of pipelined requests of one connection."""

WHEN_BROKEN = "sparring.when_broken"
"""Key of a function in a request's scope. The function is called once if the client leaves before the end of the
response, or if the connection breaks after the response and before the next request."""

TCP_CLOSE = 7
"""State of a connection that was reset, in the first byte of `TCP_INFO` (include/net/tcp_states.h of Linux)."""

LOG = logging.getLogger("sparring.gateway")
_faults = logging.getLogger("sparring.gateway.requests")
_faults.setLevel(logging.ERROR)  # uvicorn warns about each bad request, and gives wrong advice about upgrades


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Time limits of a client.

    Attributes:
        head_s: maximum seconds from the start of a connection or a request to the end of its head.
        piece_s: maximum seconds between two pieces of a body, and without progress of a client that should read a
            response.
        body_s: maximum seconds of a whole body.
    """

    head_s: float = 30.0
    piece_s: float = 120.0
    body_s: float = 600.0


class Tally:
    """Counter of requests that a server refused before they reached an endpoint. The first refusal of each kind is
    logged at once, and the totals at the end.
    """

    def __init__(self, tell: Callable[[str], None] = LOG.warning) -> None:
        self.counts: Counter[str] = Counter()
        self._tell = tell

    def add(self, kind: str) -> None:
        """Count a refusal."""
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self._tell(f"gateway: {kind}; more of these are counted, not told")

    def end(self) -> None:
        """Log the totals above one, and reset the counts."""
        for kind, number in self.counts.items():
            if number > 1:
                self._tell(f"gateway: {kind}: {number} times")
        self.counts.clear()


class Unasked:
    """Connections to which a server owes no answer: each waits for the complete head of its next request.

    Connections that sent no byte of the head and connections that sent a part form two queues, in the order of their
    last byte. Room is made at the front of the longer queue, so neither kind displaces the other.
    """

    def __init__(self) -> None:
        self._lines: tuple[dict[ClientProtocol, None], ...] = ({}, {})

    def add(self, connection: ClientProtocol, *, begun: bool) -> None:
        """Put a connection at the end of its queue. `begun`: whether a part of the head has arrived."""
        self.remove(connection)
        self._lines[begun][connection] = None

    def remove(self, connection: ClientProtocol) -> None:
        """Take a connection out of its queue, if it is queued."""
        for line in self._lines:
            line.pop(connection, None)

    def end_one(self) -> bool:
        """Close the longest silent connection, of the longer queue if possible; return False if none can be closed."""
        for line in sorted(self._lines, key=len, reverse=True):
            for oldest in line:
                if not bytes_queued(oldest.transport, termios.FIONREAD):  # what came may be the rest of the head
                    self.remove(oldest)
                    (oldest.cut if oldest.flow.write_paused else oldest.transport.close)()
                    return True
        return False


class _OverLimit(Exception):
    """Exception that stops the parser: a request exceeds a limit."""


class ClientProtocol(HttpToolsProtocol):
    """HTTP protocol of a client connection, with limits on bytes and time. Connections that break after a response are
    reported too, which happens if the client leaves before it has read everything.

    Args:
        unasked: connections to which the server owes no answer; includes this connection while that is so.
        most_sent: maximum number of bytes of a request on the wire.
    """

    def __init__(
        self,
        *arguments: Any,
        tally: Tally,
        patience: Patience,
        unasked: Unasked,
        most_sent: int = MOST_SENT,
        **named: Any,
    ) -> None:
        """Set up the limits; other arguments are uvicorn's."""
        super().__init__(*arguments, **named)
        self._patience, self._unasked, self._most_sent = patience, unasked, most_sent
        self.logger = _faults
        self._tally = tally
        self._waits_for: str = "head"  # or "body", or "answer"
        self._bytes = self._fields = 0
        self._begun = self._heard = self._stuck = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._over: tuple[int, str] | None = None
        self._client_closed = False
        self._unread: list[RequestResponseCycle] = []  # responses that the client is not known to have read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limits of a connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # a client that does not read is noticed at the first byte
        self._unasked.add(self, begun=False)
        self._begun = self._heard = self.loop.time()
        self._timer = self.loop.call_later(self._patience.head_s, self._check_time_limits)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a broken connection. `exc` is the reason, None after an orderly close."""
        super().connection_lost(exc)
        self._unasked.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        self._leave(broken=exc is not None or (self._client_closed and lost_data(self.transport)))

    def eof_received(self) -> None:
        """Note that the client closed the connection."""
        self._client_closed = True

    def _leave(self, *, broken: bool) -> None:
        """Report that the client left or gets no more data, to the application of each of its pipelined requests.

        Args:
            broken: whether the client may have left without reading all that was sent to it.
        """
        for response in self._unread:
            scope: Any = response.scope
            complete = response.response_complete
            if not complete:
                response.disconnected = True
                response.message_event.set()
            if broken or not complete:
                when_broken = scope.pop(WHEN_BROKEN, None)
                if when_broken is not None:
                    when_broken()

    def cut(self) -> None:
        """Break the connection."""
        self._leave(broken=True)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and enforce the size limits."""
        self._unset_keepalive_if_required()
        self._heard = self.loop.time()
        if self._waits_for == "answer" and self.cycle.response_complete:
            self._waits_for, self._begun, self._bytes = "head", self._heard, 0
        self._bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a WebSocket request is answered by a route, like any other
        except httptools.HttpParserError:
            self._refuse(*(self._over or (400, "Invalid HTTP request received.")))
            return
        if self._waits_for == "head" and self._bytes > MOST_HEAD:
            self._refuse(431, f"expected a head of at most {MOST_HEAD} bytes")
        elif self._bytes > self._most_sent:
            self._refuse(413, f"expected a request of at most {self._most_sent} bytes")
        elif self.cycle is None or self.cycle.response_complete:
            self._unasked.add(self, begun=self._waits_for == "head")

    def on_message_begin(self) -> None:
        """Start the time limit of a request's head."""
        super().on_message_begin()
        self._unread = [response for response in self._unread if not response.response_complete]
        if self._waits_for != "head":  # pipelined
            self._begun = self._heard
        self._waits_for, self._fields = "head", 0

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the URL."""
        self._fields += len(url)
        if self._fields > MOST_HEAD:
            self._end_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header or trailer."""
        self._fields += len(name) + len(value) + 4
        if self._fields > MOST_HEAD:
            self._end_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer a request."""
        self._waits_for, self._begun, self._bytes = "body", self._heard, 0
        if len(self.pipeline) >= MOST_WAITING:
            self._stop(429, f"expected at most {MOST_WAITING} requests ahead of their answers")
        super().on_headers_complete()
        self._unasked.remove(self)
        self._unread.append(self.cycle)

    def on_message_complete(self) -> None:
        """Stop the time limit of a body."""
        super().on_message_complete()
        self._waits_for, self._bytes = "answer", 0

    def on_response_complete(self) -> None:
        """Go on to the next request, which may have come already."""
        if not self.pipeline:
            self._unasked.add(self, begun=self._waits_for == "head")
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read."""
        super().pause_writing()
        self._stuck = self.loop.time()

    def _end_head(self) -> None:
        """Refuse a head that is too large. Raises _OverLimit."""
        self._stop(431, f"expected a head of at most {MOST_HEAD} bytes")

    def _stop(self, status: int, text: str) -> None:
        """Raise _OverLimit in a callback of the parser, to refuse a request."""
        self._over = status, text
        raise _OverLimit(text)

    def _refuse(self, status: int, text: str) -> None:
        """Respond to a request that reaches no endpoint, and close the connection."""
        self._tally.add(f"a request was refused: {status} {text}")
        if self.transport.is_closing():
            return
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(STATUS_LINE[status] + head + text.encode())
        self.transport.close()

    def _check_time_limits(self) -> None:
        """Close a connection that exceeds a time limit, or check again later."""
        now, writing = self.loop.time(), self.flow.write_paused
        patience = self._patience
        remaining_s = patience.head_s
        if writing:
            remaining_s = self._stuck + patience.piece_s - now
        elif self._waits_for == "head":
            remaining_s = self._begun + patience.head_s - now
        elif self._waits_for == "body" and not self.flow.read_paused:
            remaining_s = min(self._heard + patience.piece_s, self._begun + patience.body_s) - now
        if remaining_s > 0:
            self._timer = self.loop.call_later(min(remaining_s, patience.head_s), self._check_time_limits)
            return
        self._timer = None
        kind = "an answer was not read" if writing else f"the {self._waits_for} of a request did not come"
        self._tally.add(f"{kind} in time")
        if writing or self._waits_for == "body":
            self.cut()
        else:
            self.transport.close()


def lost_data(transport: asyncio.BaseTransport) -> bool:
    """Return whether a client closed its TCP connection before it received all data that was sent to it.

    A client's FIN acknowledges what the client has received (RFC 9293, 3.10.7.4). Data that arrives after the client
    closed its socket is answered with a reset.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == TCP_CLOSE or bytes_queued(transport, termios.TIOCOUTQ) > 0


def bytes_queued(transport: asyncio.BaseTransport, queue: int) -> int:
    """Return how many bytes of a connection are not read yet (`FIONREAD`), or not acknowledged (`TIOCOUTQ`)."""
    return int.from_bytes(fcntl.ioctl(transport.get_extra_info("socket").fileno(), queue, bytes(4)), sys.byteorder)
