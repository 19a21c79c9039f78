"""The run's side of `gateway.sock`: the run's process accepts and answers the clients of `sparring gateway`.

Connections, exchanges and sessions belong to the run, so they outlive the gateway's process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from sparring.errors import refusal
from sparring.gateway.run_socket import MOST_BYTES, SOCKET, Word, socket_path
from sparring.gateway.server import Gateway, gateway_here
from sparring.gateway.serving import PAUSE_S, LocalServer, server_settings


class _Gateways:
    """Processes of `sparring gateway` for one run; only the process that connected last serves the run."""

    def __init__(self, gateway: Gateway, server: LocalServer, report: Callable[[str], None]) -> None:
        self._gateway, self._server, self._report = gateway, server, report
        self._current: tuple[socket.socket, socket.socket] | None = None

    async def attend(self, arriving: socket.socket) -> None:
        """Serve the gateways that connect to `gateway.sock`, until cancelled."""
        async with asyncio.TaskGroup() as controls:
            while True:
                try:
                    control, _ = await asyncio.get_running_loop().sock_accept(arriving)
                except OSError:  # no descriptor is left
                    await asyncio.sleep(PAUSE_S)
                else:
                    controls.create_task(self._serve(control))

    def end(self, word: Word | None) -> None:
        """Accept no more clients, and tell the gateway why. `word` None: this process ends, and another may resume the
        run."""
        if self._current is not None:
            (control, listening), self._current = self._current, None
            self._server.leave(listening)
            listening.close()
            with suppress(OSError):  # its process has ended
                if word is not None:
                    control.send(word.encode())
                control.shutdown(socket.SHUT_RDWR)  # `_serve` closes it

    async def _serve(self, control: socket.socket) -> None:
        """Serve one gateway until its process ends, or another one replaces it."""
        loop = asyncio.get_running_loop()
        with control, suppress(OSError):
            await loop.sock_sendall(control, Word.READY.encode())
            await _readable(control)
            listening = _received(control)
            if listening is None:
                return
            self._begin(control, listening)
            try:
                await loop.sock_sendall(control, Word.BEGUN.encode())
                while await loop.sock_recv(control, MOST_BYTES):
                    pass
            finally:
                if self._current == (control, listening):
                    self.end(None)
                    self._gateway.workers.pause()
                    self._gateway.there.clear()
                    self._report("the gateway has ended; programs wait for the next one")

    def _begin(self, control: socket.socket, listening: socket.socket) -> None:
        """Let a gateway replace the previous one, whose clients' open connections are still answered."""
        self.end(Word.FOLLOWED)
        self._current = control, listening
        self._server.attend(listening)
        self._report("a gateway answers programs")
        self._gateway.workers.go_on()
        self._gateway.there.set()


@asynccontextmanager
async def behind_gateway(
    folder: Path, address: str, report: Callable[[str], None] = lambda text: None
) -> AsyncIterator[None]:
    """Answer the clients of `sparring gateway` while the context lasts.

    Doors that are opened meanwhile have the gateway's address. If the context ends with an error, the gateway keeps
    waiting for the process that resumes the run.

    Raises:
        BadInput: the folder cannot hold a socket.
    """
    gateway, loop = gateway_here(), asyncio.get_running_loop()
    with _listen(folder) as arriving:
        server = LocalServer(server_settings(gateway.application()))
        gateways = _Gateways(gateway, server, report)
        serving, attending = loop.create_task(server.serve()), loop.create_task(gateways.attend(arriving))
        gateway.address = address.rstrip("/")
        report(
            f"programs reach this run at {address}; answer them there: sparring gateway {folder} --host ... --port ..."
        )
        try:
            with gateway.workers.attending():  # waiting claims are answered before the gateway ends
                yield
            gateways.end(Word.OVER)
        finally:
            gateways.end(None)
            gateway.address = ""
            gateway.there.clear()
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
            server.should_exit = True
            await serving
            (folder / SOCKET).unlink(missing_ok=True)


def _listen(folder: Path) -> socket.socket:
    """Return the `gateway.sock` of a run, in place of one left by an earlier process. Only this user may connect."""
    arriving = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        (folder / SOCKET).unlink(missing_ok=True)
        with socket_path(folder) as short:
            arriving.bind(short)
        arriving.listen()
        arriving.setblocking(False)
    except OSError as error:
        arriving.close()
        do = "put the run's folder on a file system with Unix sockets, or leave rollout.gateway.url out"
        raise refusal(str(folder / SOCKET), "room for a Unix socket", error.strerror or str(error), do) from error
    finally:
        os.umask(before)
    return arriving


def _received(control: socket.socket) -> socket.socket | None:
    """Return the listening socket that a gateway sends; None if no socket arrives, or this process has no descriptor
    left for the socket."""
    # socket.recv_fds has no flags, and programs that the run starts must not inherit the socket
    word, ancillary, *_ = control.recvmsg(MOST_BYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
    for *_, data in ancillary:
        file = int.from_bytes(data, sys.byteorder)
        try:
            received = socket.socket(fileno=file)
        except OSError:  # it is no socket
            os.close(file)
            return None
        if word == Word.LISTENING.encode() and received.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return received
        received.close()
    return None


async def _readable(connection: socket.socket) -> None:
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, come.set)
    try:
        await come.wait()
    finally:
        loop.remove_reader(connection)
