"""HTTP servers for untrusted clients (`ClientProtocol`), with limits on the number of connections.

uvicorn accepts connections until no file descriptor is left. Here a server takes at most half of the process's file
descriptors, and makes room for a new connection by closing a connection to which no answer is owed (`Unasked`).
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sparring.errors import refusal
from sparring.gateway.client_protocol import LOG, ClientProtocol, Patience, Tally, Unasked
from sparring.open_files import allow_files

PAUSE_S = 1.0
"""Seconds before a server without a free file descriptor tries again to accept a connection."""

GRACE_S = 1
"""Seconds that connections have to finish when their server stops."""

NO_FILES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


def server_settings(application: ASGIApp, **more: Any) -> uvicorn.Config:
    """Return the uvicorn settings of a server for agent programs, or for their gateway. `more` are further settings."""
    settings = {"timeout_graceful_shutdown": GRACE_S, **more}
    return uvicorn.Config(
        application,
        log_config=None,
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        ws="none",  # a WebSocket request is answered by a route, like any other
        **settings,
    )


class BoundedServer(uvicorn.Server):
    """Server on given sockets, with limits on the number, size and time of its connections.

    Args:
        protocol: function that makes the protocol of a connection, called with the arguments of `ClientProtocol`.

    Attributes:
        tally: counter of refusals.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        tell: Callable[[str], None] = LOG.warning,
        patience: Patience = Patience(),
        *,
        protocol: Callable[..., asyncio.BaseProtocol] = ClientProtocol,
    ) -> None:
        self.tally, self._unasked = Tally(tell), Unasked()
        named = {"tally": self.tally, "patience": patience, "unasked": self._unasked}
        config.http = partial(protocol, **named)  # type: ignore[assignment]
        super().__init__(config)
        self._listening: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._joining: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on the sockets, after raising the limit of open files."""
        allow_files()
        await self.lifespan.startup()
        self.servers = []
        for listening in sockets or ():
            self.attend(listening)
        self.started = True

    def attend(self, listening: socket.socket) -> None:
        """Accept connections of a socket as they arrive."""
        self.leave(listening)  # it may wait for room
        listening.setblocking(False)
        self._listening[listening] = None
        asyncio.get_running_loop().add_reader(listening, self._take, listening)

    def leave(self, listening: socket.socket) -> None:
        """Accept no more connections of a socket; no effect on a socket that is not attended."""
        if listening in self._listening:
            pause = self._listening.pop(listening)
            if pause is None:
                asyncio.get_running_loop().remove_reader(listening)
            else:
                pause.cancel()

    async def stop_accepting(self) -> None:
        """Stop accepting connections."""
        for listening in tuple(self._listening):
            self.leave(listening)
        await asyncio.gather(*self._joining, return_exceptions=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the server."""
        await self.stop_accepting()
        await super().shutdown(sockets)
        self.tally.end()

    def _pause(self, listening: socket.socket, kind: str) -> None:
        """Stop accepting on a socket for `PAUSE_S`; `kind` is the reason, for the tally."""
        self.tally.add(kind)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._listening[listening] = loop.call_later(PAUSE_S, self.attend, listening)

    def _take(self, listening: socket.socket) -> None:
        """Accept a connection if the server has room or can make room."""
        most = most_connections()
        if len(self.server_state.connections) + len(self._joining) >= most and not self._unasked.end_one():
            self._pause(listening, f"{most} connections are open; others wait")
            return
        try:
            accepted, _ = listening.accept()
        except OSError as error:  # or the client left, or another process accepted it
            if error.errno in NO_FILES and not self._unasked.end_one():
                self._pause(listening, f"no connection could be taken, others wait: {error.strerror}")
            return
        joining = asyncio.get_running_loop().create_task(self._join(accepted))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    async def _join(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        factory: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(factory, config=self.config, server_state=self.server_state, app_state={}), accepted
            )
        except OSError:
            accepted.close()  # the client left


class LocalServer(BoundedServer):
    """Server in the event loop of another program, which handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield


def most_connections() -> int:
    """Return the maximum number of connections of a server: half of the process's file descriptors, within fixed
    bounds."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(64, min(1 << 16, (1 << 17 if soft == resource.RLIM_INFINITY else soft) // 2))


def listen_on(host: str, port: int, do: str = "choose another rollout.gateway.listen") -> socket.socket:
    """Return a listening socket.

    Args:
        do: advice to the user in the error, if the address is not available.

    Raises:
        BadInput: the address is in use, or is no address of this machine.
    """
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise refusal(f"{host}:{port}", "a free address of this machine", str(error), do) from error
    # asyncio sets this for its own sockets alone; the head and the body of a response are two writes
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    """Return the address of a socket that listens on a host."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
