"""The run's end of `gateway.sock`: what is handed over, by whom, and when the run lets go of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from refusals import refused_at

from sparring.errors import InfraError
from sparring.gateway.handover import behind_gateway
from sparring.gateway.run_socket import SOCKET, Word, connect_to_run, hand_over, next_word
from sparring.gateway.server import gateway_here


@asynccontextmanager
async def served(folder: Path, port: int = 0) -> AsyncIterator[tuple[socket.socket, str]]:
    """A gateway that has begun: its connection to the run, and where its clients are answered."""
    with await connect_to_run(folder) as control, socket.create_server(("127.0.0.1", port)) as listening:
        await hand_over(control, listening)
        assert await next_word(control) is Word.BEGUN
        yield control, f"http://127.0.0.1:{listening.getsockname()[1]}"


async def health(url: str, host: str = "127.0.0.1") -> int:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{url}/health", headers={"host": host})).status_code


def test_clients_are_answered_as_at_the_runs_own_address(tmp_path: Path) -> None:
    """A web page is refused: the run sees where its client connected to."""

    async def main() -> list[int]:
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"), served(tmp_path) as (_, url):
            return [await health(url, host) for host in ("127.0.0.1:9", "elsewhere.example")]

    assert asyncio.run(main()) == [200, 403]


def test_the_address_of_a_gateway_that_ended_is_free_for_the_next(tmp_path: Path) -> None:
    """Also while a connection of its clients is open, which is answered on."""

    async def main() -> list[int]:
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"), httpx.AsyncClient() as client:
            statuses, port = [], 0
            for _ in range(3):
                async with served(tmp_path, port) as (_, url):
                    port = int(url.rpartition(":")[2])
                    statuses += [await health(url), (await client.get(f"{url}/health")).status_code]
                statuses.append((await client.get(f"{url}/health")).status_code)
            return statuses

    assert asyncio.run(main()) == [200] * 9


def test_a_gateway_that_is_followed_has_its_connections_answered_on(tmp_path: Path) -> None:
    async def main() -> tuple[Word, int, int]:
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"), httpx.AsyncClient() as client:
            async with served(tmp_path) as (first, url):
                await client.get(f"{url}/health")
                async with served(tmp_path) as (_, other):
                    word = await next_word(first)
                    with pytest.raises(InfraError, match="has ended"):
                        await next_word(first)
                    return word, (await client.get(f"{url}/health")).status_code, await health(other)

    assert asyncio.run(main()) == (Word.FOLLOWED, 200, 200)


def files() -> set[int]:
    """The descriptors of this process."""
    return {int(file) for file in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{file}")}


def test_programs_that_the_run_starts_do_not_inherit_the_socket(tmp_path: Path) -> None:
    async def main() -> list[bool]:
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"):
            before = files()
            async with served(tmp_path):
                return [os.get_inheritable(file) for file in files() - before]

    assert asyncio.run(main()) == [False] * 4, "both ends of the connection, and of the listening socket"


@pytest.mark.parametrize("sends", ["nothing", "another word", "no socket", "a file", "a connected socket"])
def test_what_hands_over_no_listening_socket_is_let_go(tmp_path: Path, sends: str) -> None:
    """The gateway that has begun serves on, and no descriptor is left."""

    async def main() -> set[int]:
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"), served(tmp_path) as (_, url):
            file = os.open(tmp_path, os.O_RDONLY)
            before = files()
            with await connect_to_run(tmp_path) as control, socket.socket() as listening:
                listening.bind(("127.0.0.1", 0))
                if sends != "a connected socket":
                    listening.listen()
                match sends:
                    case "nothing":
                        control.shutdown(socket.SHUT_WR)
                    case "another word":
                        socket.send_fds(control, [b"GET / HTTP/1.1\r\n"], [listening.fileno()])
                    case "no socket":
                        control.send(Word.LISTENING.encode())
                    case "a file":
                        socket.send_fds(control, [Word.LISTENING.encode()], [file])
                    case _:
                        await hand_over(control, listening)
                with pytest.raises(InfraError):
                    await next_word(control)
            more = files() - before
            os.close(file)
            assert await health(url) == 200 and gateway_here().there.is_set()
            return more

    assert not asyncio.run(main())


def test_a_folder_that_holds_no_socket_is_refused(tmp_path: Path) -> None:
    (tmp_path / SOCKET / "not empty").mkdir(parents=True)

    async def main() -> None:
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"):
            pass

    with refused_at(str(tmp_path / SOCKET), "socket"):
        asyncio.run(main())
