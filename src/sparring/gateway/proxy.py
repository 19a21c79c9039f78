"""Streaming reverse proxy of `sparring gateway`: it forwards the bytes of each client to the run's server and back.

The run's server limits heads, bodies and time. If a client does not read, the proxy stops reading from the run, so that
the run's server stops writing. While the run's process is away, the proxy answers clients itself with status 503.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from sparring.errors import InfraError
from sparring.gateway.refusals import dialect_of, refusal_response, with_request_ids
from sparring.gateway.run_socket import BROKEN, CLOSED, SOCKET, Greeting, Word
from sparring.gateway.serving import (
    GRACE_S,
    PAUSE_S,
    BoundedServer,
    ClientProtocol,
    Patience,
    lost_data,
    server_settings,
)


class RunSocket:
    """Client of the socket of a run.

    Args:
        folder: folder of the run.

    Attributes:
        there: whether a process of the run is connected to this gateway.
    """

    def __init__(self, folder: Path) -> None:
        self.there = False
        self._folder, self._name = folder, secrets.token_hex(8)
        self._inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._path = f"/proc/self/fd/{self._inside}/{SOCKET}"  # a socket's own path has at most 107 bytes
        self._control: asyncio.StreamWriter | None = None

    async def words(self) -> AsyncGenerator[Word]:
        """Replace the previous gateway, and yield the words of the run's process. The first is `Word.BEGUN`.

        Raises:
            InfraError: the run's process does not answer, or has ended.
        """
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
            writer.write(_line(Greeting(gateway=self._name)))
            while line := await reader.readline():
                self._control = writer
                word = Word(line.decode().rstrip("\n"))
                self.there = word is Word.BEGUN
                yield word
        except (OSError, ValueError) as error:
            raise InfraError(f"{self._folder}: the run does not answer ({type(error).__name__}: {error})") from error
        finally:
            self.there, self._control = False, None
            if writer is not None:
                writer.close()
        raise InfraError(f"{self._folder}: the run's process has ended, or is of another version of Sparring")

    async def open(
        self, protocol: asyncio.Protocol, server: tuple[str, int], client: tuple[str, int] | None
    ) -> asyncio.Transport:
        """Open the connection to the run for one client.

        Args:
            protocol: protocol that receives the data of the run.
            server: address of the gateway that the client connected to.
            client: address of the client; None if unknown.

        Raises:
            OSError: the run's process is away.
        """
        while self.there:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.setblocking(False)
                connection.connect(self._path)
            except BlockingIOError:  # the run's queue of new connections is full
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

    def say(self, word: Word) -> None:
        """Send a word to the run, if it is there."""
        if self._control is not None:
            self._control.write(f"{word}\n".encode())

    def close(self) -> None:
        """Close the run's folder."""
        os.close(self._inside)


class _RunSide(asyncio.Protocol):
    """Connection to the run for one client."""

    def __init__(self, client: ClientSide) -> None:
        """Set up the protocol for a client."""
        self._client = client

    def data_received(self, data: bytes) -> None:
        """Forward data of the run to the client."""
        self._client.send(data)

    def eof_received(self) -> bool:
        """Close the client's connection after all data of the run."""
        self._client.finish()
        return True  # stay open for the mark, which is sent when the client has left

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the client's connection, or break it if the run's connection broke."""
        if exc is None:
            self._client.finish()
        else:
            self._client.cut()

    def pause_writing(self) -> None:
        """Stop reading from the client, because the run does not read."""
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the client."""
        self._client.transport.resume_reading()


class ClientSide(asyncio.Protocol):
    """Connection of a client, whose bytes are forwarded to the run.

    Args:
        run: socket of the run.
        ended: called when the connection has ended.
        server_state: state of the server that answers while the run's process is away, shared by its connections.
        patience: time limits of the client.
        named: other named arguments of `ClientProtocol`.

    Attributes:
        transport: transport of the client's connection.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        run: RunSocket,
        ended: Callable[[], None],
        *,
        server_state: ServerState,
        patience: Patience,
        **named: Any,
    ) -> None:
        """Set up the protocol, and the one that answers while the run's process is away."""
        self._run, self._ended, self._patience, self._state = run, ended, patience, server_state
        self._local = partial(ClientProtocol, server_state=server_state, patience=patience, **named)
        self._loop = asyncio.get_running_loop()
        self._to_run: asyncio.Transport | None = None
        self._broken = self._client_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open the connection to the run, and read nothing from the client until it is open."""
        self.transport = transport
        self._state.connections.add(self)  # type: ignore[arg-type]
        transport.pause_reading()
        self._opening = self._loop.create_task(self._open())

    def connection_lost(self, exc: Exception | None) -> None:
        """Send the run a mark and close its connection. `exc`: why the client's connection broke; None after an orderly
        close."""
        self._state.connections.discard(self)
        self._opening.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._to_run is not None:
            lost = self._client_closed and lost_data(self.transport)
            self._to_run.write(BROKEN if self._broken or lost or exc is not None else CLOSED)
            # unread data of the run breaks this connection, so that the run knows that the client did not receive it
            self._to_run.close()
        self._ended()

    def data_received(self, data: bytes) -> None:
        """Forward data of the client, after the marks of connections whose end was read in the same turn of the event
        loop."""
        assert self._to_run is not None, "nothing is read before"
        self._loop.call_soon(self._to_run.write, data)

    def eof_received(self) -> None:
        """Note that the client closed the connection."""
        self._client_closed = True

    def send(self, data: bytes) -> None:
        """Send data of the run to the client. Data after the client's end is lost, and breaks the connection."""
        self._broken = self._broken or self._client_closed
        self.transport.write(data)

    def pause_writing(self) -> None:
        """Stop reading from the run, because the client does not read, and start the client's time limit."""
        self._wait_at_most()
        if self._to_run is not None:
            self._to_run.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the run."""
        if self._timer is not None and not self.transport.is_closing():
            self._timer.cancel()
        if self._to_run is not None:
            self._to_run.resume_reading()

    def cut(self) -> None:
        """Break the connection."""
        self._broken = True
        self.transport.abort()

    def shutdown(self) -> None:
        """Do nothing: the run closes its connections after the responses that are being sent."""

    def finish(self) -> None:
        """Close the connection after the written data, which the client must read within its time limit."""
        if not self.transport.is_closing():
            self.transport.close()
            self._wait_at_most()

    def _wait_at_most(self) -> None:
        """Break the connection if the client does not read within `piece_s` of `Patience`."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._patience.piece_s, self.cut)

    async def _open(self) -> None:
        """Open the connection to the run. If its process is away, answer the client in this process."""
        transport = self.transport
        server, client = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        try:
            self._to_run = await self._run.open(_RunSide(self), server[:2], client and client[:2])
        except OSError:
            self._state.connections.discard(self)
            local = self._local()
            transport.set_protocol(local)
            local.connection_made(transport)
        transport.resume_reading()


class ProxyServer(BoundedServer):
    """Server of `sparring gateway`.

    Args:
        run: socket of the run whose clients are forwarded.
        patience: time limits of clients.
    """

    def __init__(self, run: RunSocket, patience: Patience = Patience()) -> None:
        settings = server_settings(_away(), timeout_graceful_shutdown=GRACE_S + 1)  # the run's server stops first
        super().__init__(settings, patience=patience, protocol=partial(ClientSide, run, self.go_on), files=2)
        self._run = run

    def make_room(self) -> bool:
        """Close one connection that waits for no answer, or have the run close one, after which `go_on` is called."""
        made = super().make_room()
        if not made:
            self._run.say(Word.FULL)
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the server, after the responses that the run is sending."""
        self._run.say(Word.LEAVES)
        await super().shutdown(sockets)


def _away() -> ASGIApp:
    """Return the ASGI application that answers while the run's process is away."""
    error = InfraError("the run's process is away; send the request again")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = refusal_response(dialect_of(scope), error)
        response.headers["connection"] = "close"  # the next request may reach the run
        await response(scope, receive, send)

    return with_request_ids(answer)


def _line(greeting: Greeting) -> bytes:
    return msgspec.json.encode(greeting) + b"\n"
