"""The run's end of the socket of `sparring gateway`: greetings, marks, and what a gateway that dies leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from refusals import refused_at
from sessions import opened, said, says

from sparring.gateway.proxied import proxied
from sparring.gateway.proxy import RunSocket
from sparring.gateway.run_socket import CLOSED, MOST_GREETING, SOCKET
from sparring.gateway.server import gateway_here

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def behind(folder: Path) -> AsyncIterator[tuple[RunSocket, Any]]:
    """A gateway that has begun, and a door."""
    async with proxied(folder, "http://127.0.0.1:9"):
        run = RunSocket(folder)
        words = run.words()
        await anext(words)
        door = await gateway_here().open(opened(says(said("One."), said("Two."))))
        yield run, door
        await gateway_here().shut(door)
        await words.aclose()
        run.close()


async def asked(run: RunSocket, head: str, body: Any = None, mark: bytes = b"", more: bytes = b"") -> bytes:
    """Send a request and `more`, read what comes back until the run closes its end, and leave by a mark, or as a gateway
    that is killed."""
    reader, data = asyncio.StreamReader(), b"" if body is None else json.dumps(body).encode()
    to_run = await run.open(asyncio.StreamReaderProtocol(reader), ("127.0.0.1", 9), None)
    after = "keep-alive" if more else "close"
    to_run.write(f"{head}content-length: {len(data)}\r\nconnection: {after}\r\n\r\n".encode() + data + more)
    answer = await reader.read()
    to_run.write(mark)
    to_run.close()
    return answer


@pytest.mark.parametrize(("mark", "texts"), [(b"", ["One.", "One."]), (CLOSED, ["One.", "Two."])])
def test_an_answer_behind_which_the_gateway_dies_is_given_again(tmp_path: Path, mark: bytes, texts: list[str]) -> None:
    """Also where the run had ended the connection behind it. One whose client closed its connection was delivered."""

    async def main() -> list[str]:
        async with behind(tmp_path) as (run, door):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {door.key}\r\n"
            answers = [await asked(run, head, BODY, mark) for _ in range(2)]
        return [json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] for answer in answers]

    assert asyncio.run(main()) == texts


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_run_cut_short_is_not_delivered(tmp_path: Path, stream: bool) -> None:
    """What is no request ends the connection before the answer, and the client then closes its end."""

    async def main() -> tuple[bytes, bytes]:
        async with behind(tmp_path) as (run, door):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {door.key}\r\n"
            cut = await asked(run, head, {**BODY, "stream": stream}, CLOSED, b"\0\r\n\r\n")
            return cut, await asked(run, head, BODY, CLOSED)

    cut, again = asyncio.run(main())
    assert cut == b"" and b"One." in again


def test_a_folder_that_holds_no_socket_is_refused(tmp_path: Path) -> None:
    (tmp_path / SOCKET / "not empty").mkdir(parents=True)

    async def main() -> None:
        async with proxied(tmp_path, "http://127.0.0.1:9"):
            pass

    with refused_at(str(tmp_path / SOCKET), "socket"):
        asyncio.run(main())


def test_a_web_page_is_refused_as_at_the_runs_own_address(tmp_path: Path) -> None:
    async def main() -> list[bytes]:
        async with behind(tmp_path) as (run, _):
            heads = (f"GET /health HTTP/1.1\r\nhost: {host}\r\n" for host in ("127.0.0.1:9", "elsewhere.example"))
            return [(await asked(run, head, mark=CLOSED)).split()[1] for head in heads]

    assert asyncio.run(main()) == [b"200", b"403"]


@pytest.mark.parametrize(
    "line",
    [b"GET / HTTP/1.1\n", b"[]\n", b"\xff\n", b'{"gateway":"x","server":["127.0.0.1",9]}\n', b"x" * MOST_GREETING * 2],
)
def test_what_greets_as_no_gateway_of_the_run_is_let_go(tmp_path: Path, line: bytes) -> None:
    async def main() -> bytes:
        async with behind(tmp_path):
            reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
            writer.write(line)
            left = await reader.read()
            writer.close()
            return left

    assert asyncio.run(main()) == b""
