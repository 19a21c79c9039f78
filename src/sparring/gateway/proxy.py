"""Reverse proxy of `sparring gateway`: the bytes of each client, to the run's own server and back, as they come.

The run's server bounds heads, bodies and time; a client that does not read is not read for either, so the run sees it
wait. While the run's process is away, clients are answered here, with status 503.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from sparring.errors import InfraError
from sparring.gateway.refusals import dialect_of, identified, refused
from sparring.gateway.run_socket import BROKEN, CLOSED, SOCKET, Greeting, Word
from sparring.gateway.serving import GRACE_S, PAUSE_S, BoundedServer, ClientProtocol, Patience, Tally, server_settings


class RunSocket:
    """Gateway's end of the socket of the run whose folder it was given.

    Args:
        folder: of the run.

    Attributes:
        there: whether a process of the run has taken this gateway.
    """

    def __init__(self, folder: Path) -> None:
        self.there = False
        self._folder, self._name = folder, secrets.token_hex(8)
        self._inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._path = f"/proc/self/fd/{self._inside}/{SOCKET}"  # a socket's own path has at most 107 bytes
        self._own: asyncio.StreamWriter | None = None

    async def words(self) -> AsyncGenerator[Word]:
        """Take over from the gateway before; yield what the run says of this one, the first when it has begun.

        Raises:
            InfraError: the run does not answer, or its process has ended.
        """
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
            writer.write(_line(Greeting(gateway=self._name)))
            while line := await reader.readline():
                self._own = writer
                word = Word(line.decode().rstrip("\n"))
                self.there = word is Word.BEGUN
                yield word
        except (OSError, ValueError) as error:
            raise InfraError(f"{self._folder}: the run does not answer ({type(error).__name__}: {error})") from error
        finally:
            self.there, self._own = False, None
            if writer is not None:
                writer.close()
        raise InfraError(f"{self._folder}: the run's process has ended, or is of another version of Sparring")

    async def open(
        self, protocol: asyncio.Protocol, server: tuple[str, int], client: tuple[str, int] | None
    ) -> asyncio.Transport:
        """Open the connection by which a client reaches the run.

        Args:
            protocol: reads what the run sends.
            server: address that the client reached.
            client: its own address, where it is known.

        Raises:
            OSError: the run's process is away.
        """
        while self.there:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.setblocking(False)
                connection.connect(self._path)
            except BlockingIOError:  # many wait to be taken by the run
                connection.close()
                await asyncio.sleep(PAUSE_S)
                continue
            except OSError:
                connection.close()
                raise
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=connection)
            transport.write(_line(Greeting(gateway=self._name, server=server, client=client)))
            return transport
        raise ConnectionRefusedError

    def leave(self) -> None:
        """Tell the run that this gateway ends."""
        if self._own is not None:
            self._own.write(f"{Word.LEAVES}\n".encode())

    def close(self) -> None:
        """Forget the run."""
        os.close(self._inside)


class _RunSide(asyncio.Protocol):
    """Connection to the run that carries the bytes of one client."""

    def __init__(self, client: ClientSide) -> None:
        """Carry what a client sends and gets."""
        self._client = client

    def data_received(self, data: bytes) -> None:
        """Pass on what the run sends."""
        self._client.transport.write(data)

    def eof_received(self) -> bool:
        """Close the client's connection behind all of it."""
        self._client.finish()
        return True  # the mark is sent when the client has gone

    def connection_lost(self, exc: Exception | None) -> None:
        """End the client's connection as the run's did."""
        if exc is None:
            self._client.finish()
        else:
            self._client.cut()

    def pause_writing(self) -> None:
        """Read no more from the client: the run does not read."""
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read from the client again."""
        self._client.transport.resume_reading()


class ClientSide(asyncio.Protocol):
    """Connection of a client, whose bytes are passed on to the run.

    Args:
        run: is reached by its socket.
        config: of the server that answers while the run's process is away.
        server_state: of the server.
        tally: counts what is refused meanwhile.
        patience: with a client.

    Attributes:
        transport: of the client.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        run: RunSocket,
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        tally: Tally,
        patience: Patience,
    ) -> None:
        """Make what a connection is handed to."""
        self._run, self._patience, self._state = run, patience, server_state
        self._alone = partial(
            ClientProtocol,
            config=config,
            server_state=server_state,
            app_state=app_state,
            tally=tally,
            patience=patience,
        )
        self._loop = asyncio.get_running_loop()
        self._to_run: asyncio.Transport | None = None
        self._broken = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection; nothing is read before the run has taken it."""
        self.transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]
        transport.pause_reading()
        self._opening = self._loop.create_task(self._open())

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection to the run; `exc`: why the client's broke, None where it was closed."""
        self._state.connections.discard(self)
        self._opening.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._to_run is not None:
            self._to_run.write(BROKEN if self._broken or exc is not None else CLOSED)
            self._to_run.close()  # what is left unread breaks it: the run knows that the client has not got all

    def data_received(self, data: bytes) -> None:
        """Pass on what the client sends, behind the end of connections that was read in the same turn of the loop."""
        assert self._to_run is not None, "nothing is read before"
        self._loop.call_soon(self._to_run.write, data)

    def pause_writing(self) -> None:
        """Read no more from the run: the client does not read. It has a while to go on."""
        self._wait_at_most()
        if self._to_run is not None:
            self._to_run.pause_reading()

    def resume_writing(self) -> None:
        """Read from the run again."""
        if self._timer is not None and not self.transport.is_closing():
            self._timer.cancel()
        if self._to_run is not None:
            self._to_run.resume_reading()

    def cut(self) -> None:
        """Break the connection."""
        self._broken = True
        self.transport.abort()

    def shutdown(self) -> None:
        """Wait for the run, which ends its connections behind the answers that are under way."""

    def finish(self) -> None:
        """Close the connection behind what was written, for which the client has a while."""
        if not self.transport.is_closing():
            self.transport.close()
            self._wait_at_most()

    def _wait_at_most(self) -> None:
        """Break the connection unless the client goes on to read in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._patience.piece_s, self.cut)

    async def _open(self) -> None:
        """Open the connection to the run, or answer alone."""
        transport = self.transport
        server, client = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        try:
            self._to_run = await self._run.open(_RunSide(self), server[:2], client and client[:2])
        except OSError:
            self._state.connections.discard(self)
            alone = self._alone()
            transport.set_protocol(alone)
            alone.connection_made(transport)
        transport.resume_reading()


class ProxyServer(BoundedServer):
    """Server of `sparring gateway`.

    Args:
        run: whose clients are taken.
        patience: with clients.
    """

    def __init__(self, run: RunSocket, patience: Patience = Patience()) -> None:
        settings = server_settings(_away(), timeout_graceful_shutdown=GRACE_S + 1)  # the run's own server ends before
        super().__init__(settings, patience=patience, protocol=partial(ClientSide, run), files=2)
        self._run = run

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the server."""
        self._run.leave()
        await super().shutdown(sockets)


def _away() -> ASGIApp:
    """Return the application that answers while the run's process is away."""
    error = InfraError("the run's process is away; send the request again")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = refused(dialect_of(scope), error)
        response.headers["connection"] = "close"  # the next request may reach the run
        await response(scope, receive, send)

    return identified(answer)


def _line(greeting: Greeting) -> bytes:
    return msgspec.json.encode(greeting) + b"\n"
