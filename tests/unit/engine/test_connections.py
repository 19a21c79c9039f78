"""HTTP connections against real sockets: good servers, and each way in which a server can be bad."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from virtual import on_event_loop

from sparring.engine.adapters.connections import MOST_HEAD, ConnectError, Connections

WHOLE = b"HTTP/1.1 200 OK\r\nX-Name: here\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\ntrailer: x\r\n\r\n"
ENDLESS = 24 << 20
"""More bytes than any buffer between the two holds."""

Conduct = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A server whose conduct is given: `conduct(number of the connection, reader, writer)`."""

    def __init__(self, conduct: Conduct) -> None:
        self._conduct = conduct
        self.heads: list[tuple[int, bytes]] = []
        self.closed: asyncio.Queue[int] = asyncio.Queue()
        self.connections = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        number, self.connections = self.connections, self.connections + 1
        try:
            await self._conduct(number, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self.closed.put_nowait(number)

    async def request(self, number: int, reader: asyncio.StreamReader) -> bytes:
        """Return the body of the next request."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append((number, head))
        return await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))


@asynccontextmanager
async def served(conduct: Callable[[Server], Conduct], path: str = "") -> AsyncIterator[tuple[Server, Connections]]:
    """A server and connections to it."""
    server: Server
    server = Server(lambda *call: conduct(server)(*call))
    listening = await asyncio.start_server(server.take, "127.0.0.1")
    port = listening.sockets[0].getsockname()[1]
    client = Connections(f"http://127.0.0.1:{port}{path}", {"authorization": "Bearer k"}, connect_s=10)
    try:
        yield server, client
    finally:
        client.close()
        listening.close()


def answering(*answers: bytes) -> Callable[[Server], Conduct]:
    """The conduct of a server that gives these answers, one per request of a connection, and closes behind the last."""

    def of(server: Server) -> Conduct:
        async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for answer in answers:
                await server.request(number, reader)
                writer.write(answer)
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            await reader.read()

        return conduct

    return of


async def read(client: Connections, body: bytes = b"{}") -> tuple[int, bytes]:
    with await client.post("/v1/x", body) as answer:
        return answer.status, await answer.read()


@on_event_loop
async def test_one_connection_serves_requests_behind_each_other_and_parts_of_the_head_arrive() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + WHOLE
    refused = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
    async with served(answering(WHOLE, CHUNKED, early, refused, WHOLE), "/behind/") as (server, client):
        with await client.post("/v1/x", b"body") as answer:
            assert (answer.status, answer.headers["x-name"]) == (200, "here")
        got = [await read(client) for _ in range(4)]
        assert got == [(200, b"hello"), (200, b"hello"), (503, b""), (200, b"hello")]
        assert server.connections == 1
        head = server.heads[0][1]
        assert head.startswith(b"POST /behind/v1/x HTTP/1.1\r\nhost: 127.0.0.1:") and b"Bearer k\r\n" in head


@on_event_loop
async def test_requests_at_once_have_a_connection_each_which_are_kept() -> None:
    async with served(answering(*[WHOLE] * 9)) as (server, client):
        for _ in range(3):
            assert await asyncio.gather(*(read(client) for _ in range(3))) == [(200, b"hello")] * 3
        assert server.connections == 3


def closes_as_asked(answer_on_second: bool) -> Callable[[Server], Conduct]:
    """A server whose first connection answers once, and ends without a word when the next request has come."""

    def of(server: Server) -> Conduct:
        async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(number, reader)
            if number == 0 or answer_on_second:
                writer.write(WHOLE)
                await server.request(number, reader)

        return conduct

    return of


@pytest.mark.parametrize("answers", [True, False])
@on_event_loop
async def test_a_kept_connection_that_closes_as_a_request_leaves_is_tried_anew_once(answers: bool) -> None:
    async with served(closes_as_asked(answers)) as (server, client):
        await read(client, b"1")
        if answers:
            assert await read(client, b"2") == (200, b"hello")
        else:  # the new connection does so too
            with pytest.raises(ConnectionError):
                await read(client, b"2")
        assert [number for number, _ in server.heads] == [0, 0, 1] and server.connections == 2


@on_event_loop
async def test_a_connection_that_the_server_closed_while_idle_is_not_used() -> None:
    close = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello"
    async with served(answering(WHOLE)) as (server, client):
        assert [await read(client) for _ in range(3)] == [(200, b"hello")] * 3
        assert [number for number, _ in server.heads] == [0, 1, 2]
    async with served(answering(close, WHOLE)) as (server, client):
        assert [await read(client) for _ in range(2)] == [(200, b"hello")] * 2
        assert [number for number, _ in server.heads] == [0, 1]


BAD = {
    "nothing": (b"", ConnectionError, "closed"),
    "half a head": (b"HTTP/1.1 200 OK\r\nx-na", ConnectionError, "closed"),
    "half a body": (WHOLE[:-2], ConnectionError, "closed"),
    "half a chunk": (CHUNKED[:-20], ConnectionError, "closed"),
    "garbage": (b"SSH-2.0-OpenSSH_9.6\r\n", ValueError, "expected HTTP, got b'SSH-2.0"),
    "a bad chunk": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", ValueError, "HTTP"),
    "another protocol": (
        b"HTTP/1.1 101 Changed\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        ValueError,
        "change of protocol",
    ),
    "a head without end": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (MOST_HEAD // 4), ValueError, "a head of at most"),
}


@pytest.mark.parametrize(("answer", "kind", "said"), BAD.values(), ids=BAD)
@on_event_loop
async def test_a_bad_answer_is_an_error_and_the_request_is_sent_once(
    answer: bytes, kind: type[Exception], said: str
) -> None:
    async with served(answering(answer)) as (server, client):
        with pytest.raises(kind, match=said):
            await read(client)
        assert len(server.heads) == 1


@on_event_loop
async def test_an_answer_may_end_with_its_connection_and_nobody_gets_an_answer_that_was_not_asked_for() -> None:
    async with served(answering(b"HTTP/1.0 200 OK\r\n\r\nhello")) as (_, client):
        assert await read(client) == (200, b"hello")
    async with served(answering(WHOLE + WHOLE.replace(b"hello", b"wrong"), WHOLE)) as (server, client):
        assert [await read(client) for _ in range(2)] == [(200, b"hello")] * 2
        assert server.connections == 2


def silent(server: Server) -> Conduct:
    """A server that reads and says the head alone."""

    async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(number, reader)
        writer.write(WHOLE[: -5 * number or None] if number else b"")
        await reader.read()

    return conduct


@on_event_loop
async def test_who_leaves_closes_the_connection_before_and_behind_the_head() -> None:
    async with served(silent) as (server, client):
        task = asyncio.create_task(read(client))
        while not server.heads:
            await asyncio.sleep(0)
        task.cancel()
        assert await server.closed.get() == 0
        with await client.post("/", b""):
            pass
        assert await server.closed.get() == 1


@on_event_loop
async def test_closing_the_client_fails_its_requests_and_later_ones() -> None:
    async with served(silent) as (server, client):
        task = asyncio.create_task(read(client))
        while not server.heads:
            await asyncio.sleep(0)
        client.close()
        for failing in (task, read(client)):
            with pytest.raises(ConnectionAbortedError, match="closed"):
                await failing
        assert await server.closed.get() == 0 and server.connections == 1


@on_event_loop
async def test_a_slow_reader_stops_the_server() -> None:
    written = asyncio.Event()

    def flooding(server: Server) -> Conduct:
        async def conduct(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(number, reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % ENDLESS + bytes(ENDLESS))
            await writer.drain()
            written.set()
            await reader.read()

        return conduct

    async with served(flooding) as (_, client):
        with await client.post("/", b"") as answer:
            for _ in range(1000):  # passes of the loop, in which all would arrive
                await asyncio.sleep(0)
            assert not written.is_set()
            assert len(await answer.read()) == ENDLESS
            await written.wait()


@on_event_loop
async def test_a_server_that_cannot_be_reached_is_an_error(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:1", f"unix:{tmp_path / 'none'}"):
        with pytest.raises(ConnectError):
            await read(Connections(url, {}, connect_s=10))
    with pytest.raises(ConnectError, match="no connection within 0 s"):
        await read(Connections("http://127.0.0.1:1", {}, connect_s=0))


@on_event_loop
async def test_sockets_in_the_file_system(tmp_path: Path) -> None:
    server: Server
    server = Server(lambda *call: answering(WHOLE, WHOLE)(server)(*call))
    listening = await asyncio.start_unix_server(server.take, tmp_path / "socket")
    client = Connections(f"unix:{tmp_path / 'socket'}", {}, connect_s=10)
    assert [await read(client) for _ in range(2)] == [(200, b"hello")] * 2
    assert server.connections == 1 and b"host: engine\r\n" in server.heads[0][1]
    client.close()
    listening.close()


@on_event_loop
async def test_https() -> None:
    """With ciphers that need no certificate, which no other context accepts."""

    def anonymous(protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("AECDH-AES128-SHA:@SECLEVEL=0")
        return context

    server: Server
    server = Server(lambda *call: answering(CHUNKED, WHOLE)(server)(*call))
    listening = await asyncio.start_server(server.take, "127.0.0.1", ssl=anonymous(ssl.PROTOCOL_TLS_SERVER))
    url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = Connections(url, {}, connect_s=10, tls=anonymous(ssl.PROTOCOL_TLS_CLIENT))
    assert [await read(client) for _ in range(2)] == [(200, b"hello")] * 2 and server.connections == 1
    client.close()
    with pytest.raises(ConnectError):
        await read(Connections(url, {}, connect_s=10, tls=ssl.create_default_context()))
    listening.close()
