"""The proxy of `sparring gateway`, before a run that is none."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from pathlib import Path

import pytest

from sparring.gateway.proxy import ProxyServer, RunSocket
from sparring.gateway.run_socket import BROKEN, SOCKET
from sparring.gateway.serving import Patience


@pytest.mark.parametrize("size", [1, 1 << 16, 4 << 20])
def test_the_run_hears_that_a_client_closed_before_its_answer_came(tmp_path: Path, size: int) -> None:
    """The client's end and the answer wait for the proxy at the same time. The client's end is orderly: it had nothing
    to read yet."""

    async def main() -> bytes:
        heard = asyncio.get_running_loop().create_future()
        listening = socket.create_server(("127.0.0.1", 0))

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"server" not in await reader.readline():
                writer.write(b"begun\n")
                await reader.read()
            else:
                assert await reader.readexactly(5) == b"asked"
                client.close()
                writer.write(bytes(size))
                try:
                    heard.set_result(await reader.read())
                except ConnectionResetError:  # the proxy has not read all
                    heard.set_result(BROKEN)
            writer.close()

        run = RunSocket(tmp_path)
        async with await asyncio.start_unix_server(answer, tmp_path / SOCKET):
            async with aclosing(run.words()) as words:
                await anext(words)
                server = ProxyServer(run)
                serving = asyncio.create_task(server.serve(sockets=[listening]))
                client = socket.create_connection(listening.getsockname())
                client.sendall(b"asked")
                mark = await heard
                server.should_exit = True
                await serving
        run.close()
        listening.close()
        return mark

    assert asyncio.run(main()) == BROKEN


def test_a_client_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    """The run does not hear that its answer has nowhere to go: it is the proxy that waits."""

    async def main() -> object:
        ended = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if b"server" not in await reader.readline():
                writer.write(b"begun\n")
                await reader.read()
            else:
                writer.write(bytes(32 << 20))
                try:
                    ended.set_result(await reader.read())
                except ConnectionResetError as error:  # of what it wrote, much was not read
                    ended.set_result(error)
            writer.close()

        run = RunSocket(tmp_path)
        listening = socket.create_server(("127.0.0.1", 0))
        async with await asyncio.start_unix_server(answer, tmp_path / SOCKET):
            async with aclosing(run.words()) as words:
                await anext(words)
                server = ProxyServer(run, Patience(piece_s=0.01))
                serving = asyncio.create_task(server.serve(sockets=[listening]))
                with socket.create_connection(listening.getsockname()):
                    left = await ended
                server.should_exit = True
                await serving
        run.close()
        listening.close()
        return left

    assert isinstance(asyncio.run(main()), ConnectionResetError)
