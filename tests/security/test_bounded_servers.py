"""What one connection may hold of a server, and for how long: heads, bodies, requests sent ahead, files."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route, Router
from starlette.types import Receive, Scope, Send

from sparring.gateway.client_protocol import MOST_HEAD, Patience
from sparring.gateway.serving import LocalServer, listen_on, server_settings


class Served:
    """A server that counts bytes of bodies, and what it told.

    Attributes:
        port: it listens on.
        told: sentences for the user.
        counts: of what was refused, while it ran.
        ended: released by each endless answer that is over.
    """

    def __init__(self) -> None:
        self.port = 0
        self.told: list[str] = []
        self.counts: dict[str, int] = {}
        self.ended = asyncio.Semaphore(0)

    async def endless(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for as long as the client is there."""

        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"data: x\n\n" * 4096
                await asyncio.sleep(0)  # as an answer does that waits for what is sampled

        try:
            await StreamingResponse(pieces())(scope, receive, send)
        finally:
            self.ended.release()

    async def sends(self, *data: bytes) -> bytes:
        """What comes back for some bytes until the server closes the connection, or an answer is there."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in data:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


async def _count(request: Request) -> Response:
    return Response(str(len(await request.body())), headers={"connection": "close"})


def served(talk: Callable[[Served], Awaitable[Any]], patience: Patience = Patience()) -> tuple[Any, Served]:
    async def main() -> tuple[Any, Served]:
        it = Served()
        routes = [Route("/", _count, methods=["GET", "POST"]), Mount("/endless", it.endless)]
        server = LocalServer(server_settings(Router(routes)), it.told.append, patience)
        with listen_on("127.0.0.1", 0) as listening:
            it.port = listening.getsockname()[1]
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                async with asyncio.timeout(30):
                    came = await talk(it)
                it.counts = dict(server.tally.counts)
            finally:
                server.should_exit = True
                await serving
        return came, it

    return asyncio.run(main())


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = MOST_HEAD + 10
REFUSED = {
    "many headers": (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (LARGE // 6) + b"\r\n", b"431"),
    "one header": (b"GET / HTTP/1.1\r\nx: " + b"y" * LARGE + b"\r\n\r\n", b"431"),
    "a header without an end": (b"GET / HTTP/1.1\r\nx: " + b"y" * LARGE, b"431"),
    "an address": (b"GET /" + b"y" * LARGE + b" HTTP/1.1\r\n\r\n", b"431"),
    "parameters": (b"GET /?" + b"a=b&" * (LARGE // 4) + b" HTTP/1.1\r\n\r\n", b"431"),
    "trailers": (CHUNKED + b"0\r\n" + b"x: y\r\n" * (LARGE // 6) + b"\r\n", b""),
    "two lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", b"400"),
    "both lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    "no length": (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"400"),
    "a size that is none": (CHUNKED + b"g\r\n", b""),
    "a size of 20 digits": (CHUNKED + b"f" * 20 + b"\r\n", b""),
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
    "NUL in a header": (b"GET / HTTP/1.1\r\nx: \x00\r\n\r\n", b"400"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_endpoint_should_see_is_refused_and_the_connection_closed(name: str) -> None:
    data, status = REFUSED[name]

    async def talk(it: Served) -> tuple[bytes, bytes]:
        return await it.sends(data), await it.sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    (came, then), it = served(talk)
    assert came.startswith(b"HTTP/1.1 " + status if status else b"")
    assert sum(it.counts.values()) == 1 and then.startswith(b"HTTP/1.1 200")


def test_a_head_within_its_bound_is_answered_however_it_is_cut() -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * (MOST_HEAD - 200) + b"\r\n\r\n"

    async def talk(it: Served) -> list[bytes]:
        pieces = [head[at : at + 7000] for at in range(0, len(head), 7000)]
        return [await it.sends(head), await it.sends(*pieces)]

    came, it = served(talk)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in came) and not it.counts


def test_a_bad_request_is_told_once_and_counted() -> None:
    async def talk(it: Served) -> None:
        for _ in range(5):
            await it.sends(b"bad\r\n\r\n")
        await it.sends(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")

    _, it = served(talk)
    first, last = it.told
    assert "400" in first and "not told" in first and last.endswith(": 5 times")


def test_requests_sent_ahead_are_bounded() -> None:
    async def talk(it: Served) -> bytes:
        return await it.sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)

    _, it = served(talk)
    (kind,) = it.counts
    assert "429" in kind


HASTY = Patience(head_s=0.05, piece_s=0.05, body_s=0.1)
SLOW = {
    "nothing": (b"",),
    "half of a head": (b"GET / HTTP/1.1\r\nHost: ",),
    "half of a body": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf",),
    "half of a chunk": (CHUNKED + b"a\r\nhalf",),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_client_that_does_not_go_on_is_let_go(name: str) -> None:
    came, it = served(lambda it: it.sends(*SLOW[name]), HASTY)
    assert sum(it.counts.values()) == 1 and "did not come" in next(iter(it.counts)), came


def test_clients_that_never_read_a_streamed_answer_are_let_go_and_hold_no_memory() -> None:
    async def talk(it: Served) -> tuple[int, bytes]:
        deaf = []
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", it.port))
            connection.sendall(b"GET /endless/ HTTP/1.1\r\nHost: x\r\n\r\n")
            deaf.append(connection)
        honest = await it.sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for connection in deaf:
            await it.ended.acquire()
            connection.close()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, honest

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (grown_kb, honest), it = served(talk, HASTY)
    assert honest.startswith(b"HTTP/1.1 200")
    assert it.counts == {"an answer was not read in time": 20} and len(it.told) == 2
    assert grown_kb < 64 << 10, "sockets hold what their client does not read, the server a little of it"
