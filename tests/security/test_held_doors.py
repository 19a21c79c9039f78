"""Connections without a whole head, more than a server may hold: nobody with a request waits for them."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sparring.gateway.run_socket import Word, connect_to_run, hand_over, next_word

SERVER = """
import asyncio, resource, sys
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, Router
from sparring.gateway.client_protocol import Patience
from sparring.gateway.serving import LocalServer, listen_on, server_settings

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
going = asyncio.Event()

async def here(request):
    return PlainTextResponse("here")

async def large(request):
    return PlainTextResponse(bytes(4 << 20))

async def go(request):
    going.set()
    return PlainTextResponse("gone")

async def long(request):
    async def pieces():
        yield "begun,"
        await going.wait()
        yield "ended"
    return StreamingResponse(pieces())

listening = listen_on("127.0.0.1", 0)
print(listening.getsockname()[1], flush=True)
routes = [Route("/", here, methods=["GET", "POST"]), Route("/large", large), Route("/go", go), Route("/long", long)]
settings, patience = server_settings(Router(routes), timeout_keep_alive=3600), Patience(head_s=3600, piece_s=3600)
asyncio.run(LocalServer(settings, lambda text: None, patience).serve(sockets=[listening]))
"""
RUN = """
import asyncio, resource, sys
from pathlib import Path
from sparring.gateway.handover import behind_gateway

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)

async def main():
    async with behind_gateway(Path(sys.argv[2]), "http://127.0.0.1:9"):
        print("begun", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HELD = {
    "nothing": b"",
    "half of a head": b"GET / HTTP/1.1\r\nHost: ",
    "a request and nothing more": GET,
    "a request and half of a head": GET + b"GET / HTTP/1.1\r\nHo",
    "a request whose body never comes": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n",
    "a request whose answer is not read": b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
}
FEW, ROOM = 50, 64
"""Files of a server: it has fewer than connections, or room for 64 connections."""


class Held:
    """A server in a process with few files."""

    def __init__(self, port: int, stack: ExitStack) -> None:
        self._port, self._stack = port, stack

    def opened(self, data: bytes = b"") -> socket.socket:
        """A new connection on which some bytes were sent."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(25)
        connection.connect(("127.0.0.1", self._port))
        connection.sendall(data)
        return self._stack.enter_context(connection)

    def asks(self, path: str = "/") -> bytes:
        """The answer to an honest client."""
        return answer(self.opened(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()))


def answer(connection: socket.socket) -> bytes:
    came = http.client.HTTPResponse(connection)
    came.begin()
    return came.read()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextmanager
def serving(files: int) -> Iterator[Held]:
    with (
        subprocess.Popen([sys.executable, "-c", SERVER, str(files)], stdout=subprocess.PIPE, text=True) as process,
        ExitStack() as stack,
    ):
        assert process.stdout is not None
        try:
            yield Held(int(process.stdout.readline()), stack)
        finally:
            process.kill()


@pytest.mark.parametrize("files", [pytest.param(FEW, marks=pytest.mark.full), 2 * ROOM])
def test_an_honest_client_is_answered_beside_more_than_a_server_can_hold(files: int) -> None:
    with serving(files) as server:
        for data in HELD.values():
            for _ in range(100):
                server.opened(data)
            assert server.asks() == b"here"


@pytest.mark.full
def test_the_oldest_goes_first() -> None:
    with serving(2 * ROOM) as server:
        silent = [server.opened() for _ in range(3 * ROOM)]
        assert server.asks() == b"here"
        assert all(map(is_closed, silent[: 2 * ROOM]))
        for connection in silent[-ROOM // 2 :]:
            connection.sendall(GET)
            assert answer(connection) == b"here"


@pytest.mark.parametrize(
    ("begun", "flood"),
    [
        (GET[:10], b""),
        pytest.param(GET[:10], GET, marks=pytest.mark.full),
        pytest.param(b"", GET[:10], marks=pytest.mark.full),
    ],
)
def test_a_slow_client_keeps_its_place_beside_newer_ones_of_the_other_kind(begun: bytes, flood: bytes) -> None:
    with serving(2 * ROOM) as server:
        slow = server.opened(begun)
        for _ in range(3 * ROOM):
            server.opened(flood)
        slow.sendall(GET[len(begun) :])
        assert answer(slow) == b"here"


@pytest.mark.full
def test_a_slow_client_keeps_its_place_while_its_head_comes() -> None:
    with serving(2 * ROOM) as server:
        slow = server.opened()
        for byte in GET:
            slow.sendall(bytes([byte]))
            assert server.asks() == b"here"  # so the byte has come
            for _ in range(ROOM // 4):
                server.opened(GET[:10])
        assert answer(slow) == b"here"


@pytest.mark.full
def test_a_client_that_is_being_answered_keeps_its_place() -> None:
    with serving(2 * ROOM) as server:
        asked = server.opened(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(3 * ROOM):
            server.opened()
        assert server.asks("/go") == b"gone" and answer(asked) == b"begun,ended"


LONG = (pytest.param(held, marks=pytest.mark.full) for held in ("nothing", "a request and nothing more"))


@pytest.mark.parametrize("held", ["half of a head", *LONG])
def test_a_run_behind_a_gateway_closes_them(tmp_path: Path, held: str) -> None:
    async def begin(listening: socket.socket) -> None:
        with await connect_to_run(tmp_path) as control:
            await hand_over(control, listening)
            assert await next_word(control) is Word.BEGUN
            server = Held(listening.getsockname()[1], stack)
            await asyncio.to_thread(ask, server)

    def ask(server: Held) -> None:
        for _ in range(3 * ROOM):
            server.opened(HELD[held])
        assert b"expected an address of this server" in server.asks("/health"), "answered, if by a refusal"

    words = [sys.executable, "-c", RUN, str(2 * ROOM), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process, ExitStack() as stack:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"begun\n"
            asyncio.run(begin(stack.enter_context(socket.create_server(("127.0.0.1", 0)))))
        finally:
            process.kill()
