"""Relay of a program's connections to a server that it cannot reach itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

PIECE = 1 << 16
MOST_CONNECTIONS = 16
"""Maximum number of concurrent connections of one program; further connections wait."""

FILES_OF_CONNECTION = 3
"""Open files of the run per connection: the program's socket, and both ends of the connection to the server."""

PAUSE_S = 1.0
"""Seconds until the next attempt to accept a connection after the run had no file descriptor left."""


def relay_to(url: str) -> Callable[[socket.socket], Awaitable[None]]:
    """Return a function that serves a listening socket by relaying each connection to the server of a URL."""
    address = urlsplit(url)

    async def serve(listening: socket.socket) -> None:
        await Relay(str(address.hostname), int(address.port or 80)).serve(listening)

    return serve


class Relay:
    """Relay of bytes, both ways, until the server closes. A program may close its sending side after the request and
    still read the answer."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._places = asyncio.Semaphore(MOST_CONNECTIONS)

    async def serve(self, listening: socket.socket) -> None:
        """Relay connections until cancelled; then close all of them."""
        listening.setblocking(False)
        connections: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._places.acquire()
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError:  # no file is left: new connections wait
                    self._places.release()
                    await asyncio.sleep(PAUSE_S)
                    continue
                task = loop.create_task(self._pass_on(accepted))
                connections.add(task)
                task.add_done_callback(connections.discard)
        finally:
            listening.close()
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

    async def _pass_on(self, accepted: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await asyncio.open_connection(sock=accepted)
            writers.append(writer)
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            writers.append(far_writer)
            asking = asyncio.create_task(_pump(reader, far_writer))
            answering = asyncio.create_task(_pump(far_reader, writer))
            try:
                await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and asking.result():
                    await answering
            finally:
                for way in (asking, answering):
                    way.cancel()
                await asyncio.gather(asking, answering, return_exceptions=True)
        except OSError:
            accepted.close()  # the server is gone: the program's connection closes
        finally:
            for writer in writers:
                writer.close()
            self._places.release()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Copy bytes until the end, and then end the other side. Return False if a connection broke."""
    try:
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        return False
    return True
