"""Relay of a program's connections to a server that it cannot reach itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

PIECE = 1 << 16
MOST_CONNECTIONS = 64
"""Connections of one program that are served at once; more wait."""


def relay_to(url: str) -> Callable[[socket.socket], Awaitable[None]]:
    """Return the function that serves a listening socket by passing every connection on to the server of a URL."""
    address = urlsplit(url)

    async def serve(listening: socket.socket) -> None:
        await Relay(str(address.hostname), int(address.port or 80)).serve(listening)

    return serve


class Relay:
    """Relay of bytes, both ways, until either end closes.

    Args:
        host: of the server.
        port: of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._places = asyncio.Semaphore(MOST_CONNECTIONS)

    async def serve(self, listening: socket.socket) -> None:
        """Pass connections on until cancelled; then close all of them."""
        listening.setblocking(False)
        connections: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._places.acquire()
                accepted, _ = await loop.sock_accept(listening)
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
            ways = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            accepted.close()  # the server is gone: the program sees a connection that closes
        finally:
            for writer in writers:
                writer.close()
            self._places.release()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes to their end. A connection that breaks is one that ends."""
    try:
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
