"""Servers when files run out: a process of its own under `ulimit -n`, and connections that it has no file for."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

SERVER = """
import asyncio, json, resource, sys
from contextlib import suppress
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route, Router
from sparring.gateway.serving import LocalServer, listen_on, most_connections, server_settings

async def main():
    told = []
    async def answer(request):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return Response(json.dumps([limit, most_connections(), told]))
    async def wait(request):
        with suppress(ClientDisconnect):
            await request.body()
        return await answer(request)
    server = LocalServer(server_settings(Router([Route("/", answer), Route("/", wait, methods=["POST"])])), told.append)
    with listen_on("127.0.0.1", 0) as listening:
        print(listening.getsockname()[1], flush=True)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving

asyncio.run(main())
"""


@contextmanager
def serving(soft: int, hard: int) -> Iterator[int]:
    """The port of a server whose process may have so many files."""
    command = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$0" -c "$1"'
    with subprocess.Popen(
        ["bash", "-c", command, sys.executable, SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        yield int(process.stdout.readline())
        process.stdin.close()
        assert process.wait(20) == 0 and process.stderr.read() == ""


def ask(connection: socket.socket) -> Any:
    """The limit of the server's files, its connections, and what it told."""
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return answer(connection)


def answer(connection: socket.socket) -> Any:
    came = http.client.HTTPResponse(connection)
    came.begin()
    return json.loads(came.read())


def test_a_server_takes_as_many_files_as_it_may_have() -> None:
    with serving(soft=100, hard=600) as port, socket.create_connection(("127.0.0.1", port), 20) as connection:
        assert ask(connection) == [600, 300, []]


@pytest.mark.slow  # two pauses of a second each
@pytest.mark.parametrize(("files", "told"), [(50, "no connection could be taken"), (140, "connections are open")])
def test_requests_beyond_the_files_wait_and_it_is_told_once(files: int, told: str) -> None:
    with serving(soft=files, hard=files) as port, ExitStack() as stack:
        many = []
        for _ in range(100):
            many.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            many[-1].sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
        many[0].sendall(b"x")
        assert answer(many[0])[0] == files  # those that were taken are answered
        late = many.pop()
        late.sendall(b"x")
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.recv(1)
        late.settimeout(20)
        for connection in many:
            connection.close()
        (sentence,) = answer(late)[2]
        assert told in sentence
