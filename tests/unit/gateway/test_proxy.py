"""The proxy of `sparring gateway`, before a run that is none."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from pathlib import Path

from sparring.gateway.proxy import ProxyServer, RunSocket
from sparring.gateway.run_socket import SOCKET
from sparring.gateway.serving import Patience


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
