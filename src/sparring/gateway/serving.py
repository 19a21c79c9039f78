"""Servers that strangers reach: what one connection may hold, and for how long.

uvicorn and its parser bound neither a head nor its time, accept until no file is left, and print a line for each bad
request. Here a head has `MOST_HEAD` bytes, and
heads and bodies have the seconds of `Patience`; no more connections are taken than half of the process's files; and
what is refused is told once, and counted.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sparring.open_files import allow_files

MOST_HEAD = 64 << 10
"""Most bytes of the head of a request: its line and its headers; and of the trailers behind a body."""

MOST_SENT = 16 << 20
"""Most bytes of one request as it is sent, the sizes of chunks included. Endpoints take less."""

MOST_WAITING = 16
"""Most requests that one connection may send ahead."""

PAUSE_S = 1.0
"""Seconds between two tries to take a connection where no file is left."""

GRACE_S = 1
"""Seconds that connections have when their server ends."""

WHEN_BROKEN = "sparring.when_broken"
"""Entry of a request's scope: called once where its client leaves before the answer's end, or where its connection
breaks behind the answer and before the next request."""

NO_FILES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger("sparring.gateway")
_faults = logging.getLogger("sparring.gateway.requests")
_faults.setLevel(logging.ERROR)  # uvicorn warns of each bad request, and of upgrades gives wrong advice


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Seconds that a server waits for a client.

    Attributes:
        head_s: from the beginning of a connection or a request to the end of its head.
        piece_s: between two pieces of a body; and in which a client reads nothing of an answer that waits for it.
        body_s: of a whole body.
    """

    head_s: float = 30.0
    piece_s: float = 120.0
    body_s: float = 600.0


class Tally:
    """Count of what a server refused before any endpoint saw it; the first of each kind is told, and in the end how
    many there were.

    Args:
        tell: takes a sentence for the user.
    """

    def __init__(self, tell: Callable[[str], None] = _log.warning) -> None:
        self.counts: Counter[str] = Counter()
        self._tell = tell

    def add(self, kind: str) -> None:
        """Count one."""
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self._tell(f"gateway: {kind}; more of these are counted, not told")

    def end(self) -> None:
        """Tell the counts that were not told."""
        for kind, number in self.counts.items():
            if number > 1:
                self._tell(f"gateway: {kind}: {number} times")
        self.counts.clear()


class _OverLimit(Exception):
    """A request is over a limit of its connection: status and reason."""


class ClientProtocol(HttpToolsProtocol):
    """HTTP of a client, bounded in bytes and time. It also says where a connection broke behind an answer: a client
    that leaves without having read all that was sent to it breaks it, one that has closes it.

    Args:
        tally: counts what is refused.
        patience: with the client.
    """

    def __init__(self, *arguments: Any, tally: Tally, patience: Patience, **named: Any) -> None:
        """Make what a connection is handed to; other arguments are uvicorn's."""
        super().__init__(*arguments, **named)
        self._patience = patience
        self.logger = _faults
        self._tally = tally
        self._waits_for: str = "head"  # or "body", or "answer"
        self._bytes = self._fields = 0
        self._begun = self._heard = self._stuck = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._over: tuple[int, str] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(transport)
        self._begun = self._heard = self.loop.time()
        self._timer = self.loop.call_later(self._patience.head_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection; `exc`: why it broke, None where it was closed."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        self.leave(broken=exc is not None)

    def leave(self, *, broken: bool) -> None:
        """Tell who answers that the client has left; `broken`: without having read all that was sent to it."""
        answered = self.cycle is None or self.cycle.response_complete
        if self.scope is not None and (broken or not answered):
            when_broken = self.scope.pop(WHEN_BROKEN, None)  # type: ignore[typeddict-item]
            if when_broken is not None:
                when_broken()

    def data_received(self, data: bytes) -> None:
        """Read what a client sends."""
        self._unset_keepalive_if_required()
        self._heard = self.loop.time()
        if self._waits_for == "answer" and self.cycle.response_complete:
            self._waits_for, self._begun, self._bytes = "head", self._heard, 0
        self._bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # a client that asks for a socket is answered like any other, by a route
        except httptools.HttpParserError:
            self._refuse(*(self._over or (400, "Invalid HTTP request received.")))
            return
        if self._waits_for == "head" and self._bytes > MOST_HEAD:
            self._refuse(431, f"expected a head of at most {MOST_HEAD} bytes")
        elif self._bytes > MOST_SENT:
            self._refuse(413, f"expected a request of at most {MOST_SENT} bytes")

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        if self._waits_for != "head":  # sent ahead
            self._begun = self._heard
        self._waits_for, self._fields = "head", 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._fields += len(url)
        if self._fields > MOST_HEAD:
            self._end_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._fields += len(name) + len(value) + 4
        if self._fields > MOST_HEAD:
            self._end_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request whose head is there."""
        self._waits_for, self._begun, self._bytes = "body", self._heard, 0
        if len(self.pipeline) >= MOST_WAITING:
            self._stop(429, f"expected at most {MOST_WAITING} requests ahead of their answers")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Take the end of a body."""
        super().on_message_complete()
        self._waits_for, self._bytes = "answer", 0

    def pause_writing(self) -> None:
        """Take note that the client does not read."""
        super().pause_writing()
        self._stuck = self.loop.time()

    def _end_head(self) -> None:
        """Refuse a head of too many bytes. Raises _OverLimit."""
        self._stop(431, f"expected a head of at most {MOST_HEAD} bytes")

    def _stop(self, status: int, text: str) -> None:
        """Stop the parser, from within a call of it."""
        self._over = status, text
        raise _OverLimit(text)

    def _refuse(self, status: int, text: str) -> None:
        """Answer what no endpoint will see, and close the connection."""
        self._tally.add(f"a request was refused: {status} {text}")
        if self.transport.is_closing():
            return
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(STATUS_LINE[status] + head + text.encode())
        self.transport.close()

    def _look(self) -> None:
        """Close a connection that has taken too long, or look again later."""
        now, writing = self.loop.time(), self.flow.write_paused
        patience = self._patience
        left = patience.head_s
        if writing:
            left = self._stuck + patience.piece_s - now
        elif self._waits_for == "head":
            left = self._begun + patience.head_s - now
        elif self._waits_for == "body" and not self.flow.read_paused:
            left = min(self._heard + patience.piece_s, self._begun + patience.body_s) - now
        if left > 0:
            self._timer = self.loop.call_later(min(left, patience.head_s), self._look)
            return
        self._timer = None
        kind = "an answer was not read" if writing else f"the {self._waits_for} of a request did not come"
        self._tally.add(f"{kind} in time")
        if writing or self._waits_for == "body":
            self.transport.abort()
        else:
            self.transport.close()


def server_settings(application: ASGIApp, **more: Any) -> uvicorn.Config:
    """Return the settings of a server of agent programs, or of their gateway; `more` are others of uvicorn's."""
    settings = {"timeout_graceful_shutdown": GRACE_S, **more}
    return uvicorn.Config(
        application,
        log_config=None,
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        ws="none",  # a client that asks for a socket is answered like any other, by a route
        **settings,
    )


class BoundedServer(uvicorn.Server):
    """Server on given sockets, whose connections are bounded in number, bytes and time.

    Args:
        config: of uvicorn.
        tell: takes a sentence for the user.
        patience: with clients.
        protocol: makes what a connection is handed to; it is called as `ClientProtocol` is.
        files: that one connection takes.

    Attributes:
        tally: of what is refused.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        tell: Callable[[str], None] = _log.warning,
        patience: Patience = Patience(),
        *,
        protocol: Callable[..., asyncio.BaseProtocol] = ClientProtocol,
        files: int = 1,
    ) -> None:
        self.tally = Tally(tell)
        config.http = partial(protocol, tally=self.tally, patience=patience)  # type: ignore[assignment]
        super().__init__(config)
        self._most = most_connections() // files
        self._listening: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._joining: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections of the sockets, as many as the system lets this process have files for."""
        allow_files()
        await self.lifespan.startup()
        self.servers = []
        for listening in sockets or ():
            listening.setblocking(False)
            self._attend(listening)
        self.started = True

    async def stop_accepting(self) -> None:
        """Take no more connections."""
        loop = asyncio.get_running_loop()
        for listening, pause in self._listening.items():
            if pause is None:
                loop.remove_reader(listening)
            else:
                pause.cancel()
        self._listening.clear()
        await asyncio.gather(*self._joining, return_exceptions=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the server."""
        await self.stop_accepting()
        await super().shutdown(sockets)
        self.tally.end()

    def _attend(self, listening: socket.socket) -> None:
        """Take connections of a socket as they come."""
        self._listening[listening] = None
        asyncio.get_running_loop().add_reader(listening, self._take, listening)

    def _pause(self, listening: socket.socket, kind: str) -> None:
        """Take no connection of a socket for a while; `kind`: why."""
        self.tally.add(kind)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._listening[listening] = loop.call_later(PAUSE_S, self._attend, listening)

    def _take(self, listening: socket.socket) -> None:
        """Take a connection, where there is room for it."""
        if len(self.server_state.connections) + len(self._joining) >= self._most:
            self._pause(listening, f"{self._most} connections are open; others wait")
            return
        try:
            accepted, _ = listening.accept()
        except OSError as error:  # or it has left meanwhile, or another process took it
            if error.errno in NO_FILES:
                self._pause(listening, f"no connection could be taken, others wait: {error.strerror}")
            return
        joining = asyncio.get_running_loop().create_task(self._join(accepted))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    async def _join(self, accepted: socket.socket) -> None:
        """Begin a connection."""
        accepted.setblocking(False)
        factory, loop = self.config.http_protocol_class, asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                partial(factory, config=self.config, server_state=self.server_state, app_state={}), accepted
            )
        except OSError:
            accepted.close()  # it has left meanwhile


class LocalServer(BoundedServer):
    """Server in somebody else's event loop: signals are not its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the run."""
        yield


def most_connections() -> int:
    """Return the connections that a server of this process takes at once: half of the files that it may open, or so
    many that no limit of files is near."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(1 << 16, (1 << 17 if soft == resource.RLIM_INFINITY else soft) // 2))
