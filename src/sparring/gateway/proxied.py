"""Server of a run on `gateway.sock`, for the clients of `sparring gateway`.

Clients are answered as if they had connected to the run's process directly. Exchanges are kept in this process, so they
outlive the gateway's process: an exchange whose answer was not delivered completely is broken, and the same request
through the next gateway joins it.
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

from sparring.errors import refusal
from sparring.gateway.run_socket import BROKEN, CLOSED, MOST_GREETING, SOCKET, Greeting, Word, socket_path
from sparring.gateway.server import Gateway, gateway_here
from sparring.gateway.serving import ClientProtocol, LocalServer, Patience, Unasked, server_settings


class _HalfClosing:
    """Transport whose `close` ends only the sending direction, so that the mark of a client can still be received.

    Args:
        transport: transport of the connection.
        closed: called when nothing more is sent.
    """

    def __init__(self, transport: asyncio.Transport, closed: Callable[[], None]) -> None:
        self._transport, self._closing, self._closed = transport, False, closed
        self.write: Callable[[bytes], None] = transport.write
        self.writelines: Callable[[Any], None] = transport.writelines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether further data is discarded."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Send the data written so far, and discard further data."""
        if not self.is_closing():
            self._closing = True
            self.write = self.writelines = _ignore
            self._closed()
            self._transport.resume_reading()
            try:
                self._transport.write_eof()
            except OSError:  # the gateway's process was killed
                self._transport.abort()


class Tunnel(ClientProtocol):
    """HTTP protocol of a client connection that `sparring gateway` forwards.

    Args:
        greeting: greeting of the connection.
        tunnels: open tunnels of the run, to which this tunnel is added while it is open.
    """

    def __init__(self, *arguments: Any, greeting: Greeting, tunnels: set[Tunnel], **named: Any) -> None:
        """Set up the tunnel; other arguments are those of `ClientProtocol`."""
        super().__init__(*arguments, **named)
        self._greeting, self._tunnels = greeting, tunnels
        self._marked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limits of a connection, and take the addresses of its client from the greeting."""
        super().connection_made(_HalfClosing(transport, partial(self.leave, broken=False)))  # type: ignore[arg-type]
        self.server, self.client = self._greeting.server, self._greeting.client
        self._tunnels.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a broken connection: no mark arrived, or the gateway had not read everything (`exc`)."""
        self._tunnels.discard(self)
        super().connection_lost(exc if exc is not None or self._marked else ConnectionResetError("no mark"))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and report that the client left if they end with a mark."""
        broken = data.endswith(BROKEN)
        marked = broken or data.endswith(CLOSED)
        if marked:
            data = data[: -len(CLOSED)]
        if data and not self.transport.is_closing():
            super().data_received(data)
        if marked:
            self._marked = True
            self.leave(broken=broken)  # before the client's next request, which may have arrived already


class _ControlConnection(asyncio.Protocol):
    """Control connection of a gateway's process, from the end of its greeting.

    Args:
        proxies: gateways of the run.
        unasked: connections of the run's server that it owes no answer.
        transport: transport of the connection.
    """

    def __init__(self, proxies: Proxies, unasked: Unasked, transport: asyncio.Transport) -> None:
        """Set up the protocol; the transport is connected already."""
        self._proxies, self._unasked, self._transport = proxies, unasked, transport

    def say(self, word: Word) -> None:
        """Send a word to the gateway."""
        self._transport.write(f"{word}\n".encode())

    def close(self) -> None:
        """Close the connection after the words sent so far."""
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Receive words of the gateway."""
        for word in data.split():  # a word that is cut, after many others, is said again
            if word == Word.FULL.encode():
                self._unasked.end_one()
            elif word == Word.LEAVES.encode():
                self._proxies.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the gateway's process ended."""
        self._proxies.ended(self)


class Proxies:
    """Processes of `sparring gateway` that serve a run, one at a time: the one that started last.

    Args:
        gateway: gateway that has the doors.
        report: function that shows the user a sentence.

    Attributes:
        tunnels: open client connections.
    """

    def __init__(self, gateway: Gateway, report: Callable[[str], None]) -> None:
        self.tunnels: set[Tunnel] = set()
        self._gateway, self._report = gateway, report
        self._name = ""
        self._control: _ControlConnection | None = None

    def begin(self, name: str, control: _ControlConnection) -> None:
        """Let a gateway that started replace the previous one, and break the client connections of that one."""
        before, self._control, self._name = self._control, control, name
        for tunnel in tuple(self.tunnels):
            tunnel.cut()
        if before is not None:
            before.say(Word.FOLLOWED)
            before.close()
        self._report("a gateway answers programs")
        self._gateway.workers.go_on()
        self._gateway.there.set()
        control.say(Word.BEGUN)

    def is_current(self, name: str) -> bool:
        """Return whether the gateway with this id serves the run."""
        return self._control is not None and name == self._name

    def ended(self, control: _ControlConnection) -> None:
        """Let doors and leases wait for the next gateway, unless another one has replaced the gateway that ended."""
        if control is self._control:
            self._control = None
            self._gateway.workers.pause()
            self._gateway.there.clear()
            self._report("the gateway has ended; programs wait for the next one")

    def leave(self) -> None:
        """Close the client connections of a gateway that stops, each after the response that is being sent."""
        for tunnel in tuple(self.tunnels):
            tunnel.shutdown()

    def end(self, word: Word | None) -> None:
        """Tell the gateway that it no longer serves the run. `word` None: this process ends, and another may resume the
        run."""
        control, self._control = self._control, None
        if control is not None:
            if word is not None:
                control.say(word)
            control.close()


class _Arrival(asyncio.Protocol):
    """Protocol that reads the greeting of a connection and then hands the connection on.

    Args:
        proxies: gateways of the run.
        patience: time limits of the client; the greeting has the time of a head.
    """

    def __init__(self, proxies: Proxies, *, patience: Patience, **named: Any) -> None:
        """Set up the protocol; other named arguments are those of `Tunnel`."""
        self._proxies, self._named = proxies, {"patience": patience, **named}
        self._patience, self._data = patience, b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the greeting."""
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._patience.head_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read the greeting, and hand the connection to a tunnel or to the control connection."""
        line, found, rest = (self._data + data).partition(b"\n")
        if not found:
            self._data = line
            if len(line) > MOST_GREETING:
                self._transport.abort()
            return
        self._timer.cancel()
        try:
            greeting = msgspec.json.decode(line, type=Greeting)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # another version, which tells its user
            self._transport.abort()
            return
        if greeting.server is None:
            control = _ControlConnection(self._proxies, self._named["unasked"], self._transport)
            self._transport.set_protocol(control)
            self._proxies.begin(greeting.gateway, control)
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
    """Answer the clients of the gateway's process on a socket in the run's folder while the context lasts.

    Doors that are opened meanwhile have the gateway's address. If the context ends with an error, the gateway keeps
    waiting for the process that resumes the run.

    Args:
        folder: folder of the run.
        address: address of `sparring gateway` for programs.
        report: function that shows the user a sentence.

    Raises:
        BadInput: the folder cannot hold a socket.
    """
    gateway = gateway_here()
    with _listen(folder) as listening:
        proxies = Proxies(gateway, report)
        server = LocalServer(server_settings(gateway.application()), protocol=partial(_Arrival, proxies))
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
        gateway.address = address.rstrip("/")
        report(
            f"programs reach this run at {address}; answer them there: sparring gateway {folder} --host ... --port ..."
        )
        try:
            with gateway.workers.attending():  # waiting claims are answered before the gateway ends
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
            (folder / SOCKET).unlink(missing_ok=True)


def _listen(folder: Path) -> socket.socket:
    """Return the listening socket of a run, in place of one that an earlier process left. Only its user may connect.

    Raises:
        BadInput: the folder cannot hold a socket.
    """
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        (folder / SOCKET).unlink(missing_ok=True)
        with socket_path(folder) as short:
            listening.bind(short)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        do = "put the run's folder on a file system with Unix sockets, or leave rollout.gateway.url out"
        raise refusal(str(folder / SOCKET), "room for a Unix socket", error.strerror or str(error), do) from error
    finally:
        os.umask(before)
    return listening


def _ignore(data: Any) -> None:
    pass
