"""The relay between a program in its box and the server, on real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

from sparring.harness.relay import MOST_CONNECTIONS, Relay


async def relayed(server: asyncio.Server, play: Callable[[int], Awaitable[None]]) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    serving = asyncio.create_task(Relay("127.0.0.1", port).serve(listening))
    try:
        await play(listening.getsockname()[1])
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        server.close()


def test_a_program_may_close_its_side_before_it_reads() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.read())
        writer.close()

    async def play(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"all")
        writer.write_eof()
        assert await reader.read() == b"you said all"
        writer.close()

    async def main() -> None:
        await relayed(await asyncio.start_server(answer, "127.0.0.1", 0), play)

    asyncio.run(main())


def test_a_program_that_breaks_its_connection_ends_that_of_the_server() -> None:
    async def main() -> None:
        left = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.read(100):
                    pass
            except ConnectionError:
                pass
            left.set()
            writer.close()

        async def play(port: int) -> None:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"half")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close breaks it
            connection.close()
            await left.wait()

        await relayed(await asyncio.start_server(answer, "127.0.0.1", 0), play)

    asyncio.run(main())


def test_a_program_has_sixteen_connections_and_the_next_waits_for_one_to_end() -> None:
    async def main() -> None:
        begun, many = 0, asyncio.Event()
        writers: list[asyncio.StreamWriter] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal begun
            begun += 1
            if begun == MOST_CONNECTIONS:
                many.set()
            writer.write(await reader.read(100))
            await reader.read()
            writer.close()

        async def play(port: int) -> None:
            for number in range(MOST_CONNECTIONS + 3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"%d" % number)
                writers.append(writer)
                readers.append(reader)
            await many.wait()
            assert begun == MOST_CONNECTIONS
            assert [await reader.read(2) for reader in readers[:3]] == [b"0", b"1", b"2"]
            for number in range(3):
                writers[number].close()
                assert await readers[MOST_CONNECTIONS + number].read(2) == b"%d" % (MOST_CONNECTIONS + number)
                assert begun == MOST_CONNECTIONS + number + 1
            for writer in writers:
                writer.close()

        readers: list[asyncio.StreamReader] = []
        await relayed(await asyncio.start_server(answer, "127.0.0.1", 0), play)

    asyncio.run(main())


def test_a_dead_server_takes_no_slot() -> None:
    async def main() -> None:
        closed = socket.create_server(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        closed.close()
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(Relay("127.0.0.1", port).serve(listening))
        for _ in range(2 * MOST_CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1])
            assert await reader.read() == b""
            writer.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())
