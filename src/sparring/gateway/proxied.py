"""The run's end of `gateway.sock`: its own server, reached through `sparring gateway`.

Clients are answered as where they connect to the run itself. Exchanges live here, and outlive the gateway's process:
what a client was not told to its end is a broken exchange, and the same request through the next gateway is that
exchange again.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from sparring.gateway.run_socket import BROKEN, CLOSED, MOST_GREETING, SOCKET, Greeting, Word, socket_path
from sparring.gateway.server import Gateway, gateway_here
from sparring.gateway.serving import ClientProtocol, LocalServer, Patience, server_settings


class _HalfClosing:
    """Transport whose `close` ends one direction: the other stays open for the mark that says what the client got."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._closing = transport, False
        self.write: Callable[[bytes], None] = transport.write
        self.writelines: Callable[[Any], None] = transport.writelines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether nothing more is written."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Write nothing behind what was written."""
        if not self.is_closing():
            self._closing = True
            self.write = self.writelines = _ignore
            self._transport.resume_reading()
            try:
                self._transport.write_eof()
            except OSError:  # the gateway's process was killed
                self._transport.abort()


class Tunnel(ClientProtocol):
    """HTTP of a client whose bytes come through a gateway.

    Args:
        greeting: of the connection.
        tunnels: of the run; it is one of them while it is open.
    """

    def __init__(self, *arguments: Any, greeting: Greeting, tunnels: set[Tunnel], **named: Any) -> None:
        """Make what a connection is handed to; other arguments are those of `ClientProtocol`."""
        super().__init__(*arguments, **named)
        self._greeting, self._tunnels = greeting, tunnels
        self._marked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(_HalfClosing(transport))  # type: ignore[arg-type]
        self.server, self.client = self._greeting.server, self._greeting.client
        self._tunnels.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, which was broken where no mark was there, or where the gateway had not read all."""
        self._tunnels.discard(self)
        super().connection_lost(exc if exc is not None or self._marked else ConnectionResetError("no mark"))

    def data_received(self, data: bytes) -> None:
        """Read what a client sends, and the mark behind it."""
        broken = data.endswith(BROKEN)
        marked = broken or data.endswith(CLOSED)
        if marked:
            data = data[: -len(CLOSED)]
        if data and not self.transport.is_closing():
            super().data_received(data)
        if marked:
            self._marked = True
            self.leave(broken=broken)  # at once: the next request of the client may be there already

    def cut(self) -> None:
        """Break the connection."""
        self.leave(broken=True)
        self.transport.abort()


class _OwnConnection(asyncio.Protocol):
    """Connection of a gateway's process itself."""

    def __init__(self, proxies: Proxies, transport: asyncio.Transport) -> None:
        """Take over a connection whose greeting was read."""
        self._proxies, self._transport = proxies, transport

    def say(self, word: Word) -> None:
        """Send a word."""
        self._transport.write(f"{word}\n".encode())

    def close(self) -> None:
        """Send nothing more."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Take the gateway's one word."""
        if data.startswith(Word.LEAVES.encode()):
            self._proxies.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note of the gateway's end."""
        self._proxies.ended(self)


class Proxies:
    """Processes of `sparring gateway` in front of a run, one at a time: the latest that began.

    Args:
        gateway: of the run.
        report: takes a sentence for the user.

    Attributes:
        tunnels: open connections of clients.
    """

    def __init__(self, gateway: Gateway, report: Callable[[str], None]) -> None:
        self.tunnels: set[Tunnel] = set()
        self._gateway, self._report = gateway, report
        self._name = ""
        self._own: _OwnConnection | None = None

    def begin(self, name: str, own: _OwnConnection) -> None:
        """Take a gateway that begins in the place of the one before it, whose connections are broken."""
        before, self._own, self._name = self._own, own, name
        for tunnel in tuple(self.tunnels):
            tunnel.cut()
        if before is not None:
            before.say(Word.FOLLOWED)
            before.close()
        self._report("a gateway answers programs")
        self._gateway.workers.go_on()
        self._gateway.there.set()
        own.say(Word.BEGUN)

    def is_current(self, name: str) -> bool:
        """Return whether a gateway is the run's."""
        return self._own is not None and name == self._name

    def ended(self, own: _OwnConnection) -> None:
        """Take note of the end of a gateway's process."""
        if own is self._own:
            self._own = None
            self._gateway.workers.pause()
            self._gateway.there.clear()
            self._report("the gateway has ended; programs wait for the next one")

    def leave(self) -> None:
        """End the connections of a gateway that ends, each behind the answer that is under way."""
        for tunnel in tuple(self.tunnels):
            tunnel.shutdown()

    def end(self, word: Word | None) -> None:
        """Tell the gateway that it is no longer the run's; None: this process ends, and another may go on."""
        own, self._own = self._own, None
        if own is not None:
            if word is not None:
                own.say(word)
            own.close()


class _Arrival(asyncio.Protocol):
    """Connection whose greeting has not come yet."""

    def __init__(self, proxies: Proxies, *, patience: Patience, **named: Any) -> None:
        """Make what a connection is handed to; other named arguments are those of `Tunnel`."""
        self._proxies, self._named = proxies, {"patience": patience, **named}
        self._patience, self._data = patience, b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._patience.head_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection."""
        self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read the greeting; hand the connection on."""
        line, found, rest = (self._data + data).partition(b"\n")
        if not found:
            self._data = line
            if len(line) > MOST_GREETING:
                self._transport.abort()
            return
        self._timer.cancel()
        try:
            greeting = msgspec.json.decode(line, type=Greeting)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # a gateway of another version: it says so
            self._transport.abort()
            return
        if greeting.server is None:
            own = _OwnConnection(self._proxies, self._transport)
            self._transport.set_protocol(own)
            self._proxies.begin(greeting.gateway, own)
        elif self._proxies.is_current(greeting.gateway):
            tunnel = Tunnel(greeting=greeting, tunnels=self._proxies.tunnels, **self._named)
            self._transport.set_protocol(tunnel)
            tunnel.connection_made(self._transport)
            if rest:
                tunnel.data_received(rest)
        else:
            self._transport.abort()


@asynccontextmanager
async def proxied(folder: Path, address: str, report: Callable[[str], None] = lambda text: None) -> AsyncIterator[None]:
    """Answer programs through the gateway's process, on a socket in the run's folder, while the context lasts. Doors
    that are opened meanwhile have the gateway's address. A context that ends by an error leaves the gateway waiting for
    the process that goes on with the run.

    Args:
        folder: of the run.
        address: of `sparring gateway`, as programs reach it.
        report: takes a sentence for the user.
    """
    gateway, path = gateway_here(), folder / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        before = os.umask(0o177)
        try:
            with socket_path(folder) as short:
                listening.bind(short)
        finally:
            os.umask(before)
        listening.listen(2048)
        proxies = Proxies(gateway, report)
        server = LocalServer(server_settings(gateway.application()), protocol=partial(_Arrival, proxies))
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
        gateway.address = address.rstrip("/")
        report(
            f"programs reach this run at {address}; answer them there: sparring gateway {folder} --host ... --port ..."
        )
        try:
            with gateway.workers.attending():  # the claims that wait are answered before the gateway ends
                yield
            proxies.end(Word.OVER)
        finally:
            proxies.end(None)
            gateway.address = ""
            gateway.there.clear()
            server.should_exit = True
            await serving
            for tunnel in tuple(proxies.tunnels):
                tunnel.cut()
            path.unlink(missing_ok=True)


def _ignore(data: Any) -> None:
    """Write nothing."""
