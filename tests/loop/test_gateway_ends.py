"""What `sparring gateway`, its run and their clients see when either process ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from forked import Forked

from sparring.gateway.handover import behind_gateway
from sparring.gateway.server import gateway_here, open_door
from sparring.open_files import allow_files
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message

ADDRESS = "http://127.0.0.1:9"
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
RUN = """
import asyncio, sys
from pathlib import Path
from sparring.gateway.handover import behind_gateway

async def main():
    async with behind_gateway(Path(sys.argv[1]), "http://127.0.0.1:9"):
        print("begun", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
RENDERER = toy_renderer()


async def begun(folder: Path) -> tuple[Forked, str]:
    """Start a gateway; return it and where it answers."""
    process = Forked(("gateway", folder, "--port", "0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = await said(process)
    assert line.startswith(f"gateway of {folder} on http://127.0.0.1:"), line
    return process, line.rpartition(" ")[2]


async def said(process: Forked) -> str:
    """Return the next line of a gateway."""
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).rstrip("\n")


async def ended(process: Forked) -> tuple[int | None, str, str]:
    """Return the exit status, and what a gateway had still to say."""
    out, error = await asyncio.to_thread(process.communicate)
    return process.returncode, out, error


class Reports(list[str]):
    """What a run tells its user; `next` waits for it."""

    def __init__(self) -> None:
        self._more = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.append(text)
        self._more.set()

    async def until(self, text: str) -> None:
        """Wait until this is the last that was said."""
        while self[-1] != text:
            self._more.clear()
            await self._more.wait()


def test_a_gateway_that_is_followed_says_so_and_ends_with_1(tmp_path: Path) -> None:
    async def main() -> tuple[tuple[int | None, str, str], tuple[int | None, str, str], list[str]]:
        reports = Reports()
        async with behind_gateway(tmp_path, ADDRESS, reports):
            first, _ = await begun(tmp_path)
            second, _ = await begun(tmp_path)
            followed = await ended(first)
            told = reports[1:]
        return followed, await ended(second), told

    followed, over, told = asyncio.run(main())
    assert followed[:2] == (1, "") and "another gateway has begun for this run" in followed[2]
    assert over == (0, f"{tmp_path}: the run is over\n", "")
    assert told == ["a gateway answers programs"] * 2


def test_a_gateway_whose_address_is_taken_leaves_the_one_that_has_it(tmp_path: Path) -> None:
    async def main() -> tuple[tuple[int | None, str, str], list[str]]:
        reports = Reports()
        async with behind_gateway(tmp_path, ADDRESS, reports):
            first, url = await begun(tmp_path)
            words = ("gateway", tmp_path, "--port", url.rpartition(":")[2])
            refused = await ended(Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).status_code == 200
            told = reports[1:]
        await ended(first)
        return refused, told

    (status, out, error), told = asyncio.run(main())
    assert (status, out) == (2, "") and "expected a free address" in error and "--host or --port" in error
    assert told == ["a gateway answers programs"]


def test_a_gateway_waits_for_the_process_that_goes_on_with_a_run(tmp_path: Path) -> None:
    async def main() -> tuple[list[str], list[int], tuple[int | None, str, str]]:
        engine = ScriptedEngine(lambda request: reply_tokens(RENDERER, Message(role="assistant", content="yes")))
        session = Recorder(engine, RENDERER, max_context=30_000).open(
            toy_task(), rollout_id="rl/0/0", seed=7, limits=Limits(max_turns=9, max_tokens=900)
        )
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
        lines, statuses = [], []

        async def asked(url: str, key: str) -> None:
            async with httpx.AsyncClient() as client:
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            statuses.append(answer.status_code)

        try:
            async with behind_gateway(tmp_path, ADDRESS):
                process, url = await begun(tmp_path)
                raise ConnectionResetError  # as a run ends that is interrupted, or breaks
        except ConnectionResetError:
            lines.append(await said(process))
            await asked(url, "sk-any")
        async with behind_gateway(tmp_path, ADDRESS), open_door(session) as door:
            lines.append(await said(process))
            await asked(url, door.key)
        return lines, statuses, await ended(process)

    lines, statuses, over = asyncio.run(main())
    assert lines == [
        "the run's process has ended; programs are answered again when the run goes on",
        "the run goes on",
    ]
    assert statuses == [503, 200]
    assert over == (0, f"{tmp_path}: the run is over\n", "")


def test_a_rollout_waits_for_the_gateway_of_its_run(tmp_path: Path) -> None:
    """The run says where programs reach it before anybody answers there: a program would be refused its connection."""

    async def main() -> list[bool]:
        session = Recorder(ScriptedEngine(()), RENDERER).open(toy_task(), rollout_id="rl/0/0", seed=7)
        opened = asyncio.Event()

        async def play() -> None:
            async with open_door(session):
                opened.set()

        seen = []
        async with behind_gateway(tmp_path, ADDRESS):
            for _ in range(2):
                playing = asyncio.create_task(play())
                for _ in range(100):
                    await asyncio.sleep(0)
                seen.append(opened.is_set())
                process, _ = await begun(tmp_path)
                await playing
                seen.append(opened.is_set())
                opened.clear()
                process.kill()
                await ended(process)
                while gateway_here().there.is_set():
                    await asyncio.sleep(0.01)
        return seen

    assert asyncio.run(main()) == [False, True] * 2


def test_a_run_says_that_its_gateway_has_ended(tmp_path: Path) -> None:
    async def main() -> tuple[list[str], tuple[int | None, str, str]]:
        reports = Reports()
        async with behind_gateway(tmp_path, ADDRESS, reports):
            process, _ = await begun(tmp_path)
            process.send_signal(signal.SIGINT)
            status = await ended(process)
            await reports.until("the gateway has ended; programs wait for the next one")
            process, _ = await begun(tmp_path)
            process.kill()
            await ended(process)
            await reports.until("the gateway has ended; programs wait for the next one")
            return reports[1:], status

    reports, (status, out, error) = asyncio.run(main())
    assert reports == ["a gateway answers programs", "the gateway has ended; programs wait for the next one"] * 2
    assert (status, out) == (130, "") and "Traceback" not in error


class Run:
    """The process of a run that has a gateway, and no door."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __aenter__(self) -> Run:
        words = (sys.executable, "-c", RUN, str(self._folder))
        self.process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and await self.process.stdout.readline() == b"begun\n"
        return self

    async def __aexit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


def requested(url: str) -> socket.socket:
    """A connection on which a request was sent."""
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60)
    connection.sendall(HEALTH)
    return connection


def answered(connection: socket.socket) -> str:
    """The status of an answer; empty if the connection ended, or was reset, before it came."""
    try:
        return connection.recv(12).decode()[9:]
    except ConnectionResetError:
        return ""


def test_what_a_killed_run_had_not_taken_is_answered_by_the_gateway(tmp_path: Path) -> None:
    """What it had taken is closed or reset; whoever sends again is answered by the gateway, and then by the next run."""

    async def main() -> list[str]:
        async with Run(tmp_path) as run:
            gateway, url = await begun(tmp_path)
            with requested(url) as taken:
                statuses = [answered(taken)]
                run.process.send_signal(signal.SIGSTOP)
                with ExitStack() as stack:
                    waiting = [stack.enter_context(requested(url)) for _ in range(20)]
                    run.process.kill()
                    statuses += [await asyncio.to_thread(answered, each) for each in waiting]
                with suppress(OSError):
                    taken.recv(1 << 16)
                    taken.sendall(HEALTH)
                statuses.append(answered(taken))
            assert (await said(gateway)).startswith("the run's process has ended")
            with requested(url) as again:
                head = await asyncio.to_thread(again.recv, 1 << 16)
                statuses.append(head.decode()[9:12])
                assert b"\r\nretry-after: 1\r\n" in head.lower() and b"\r\nconnection: close\r\n" in head.lower()
        async with Run(tmp_path):
            assert await said(gateway) == "the run goes on"
            with requested(url) as again:
                statuses.append(await asyncio.to_thread(answered, again))
        gateway.kill()
        await ended(gateway)
        return statuses

    assert asyncio.run(main()) == ["200", *["503"] * 20, "", "503", "200"]


@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=[pytest.mark.kills, pytest.mark.slow])])
def test_clients_that_send_again_are_answered_however_often_the_run_is_killed(tmp_path: Path, rounds: int) -> None:
    """None of 300 at once is refused its connection: the gateway listens on."""
    clients = 300
    seen: Counter[str] = Counter()

    async def ask(port: int) -> None:
        status = b""
        while status != b"200":
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionResetError):
                writer.write(HEALTH)
                status = (await reader.read(12))[9:]
                seen[status.decode()] += 1
            writer.close()
            if status == b"503":
                await back.wait()

    async def main() -> None:
        async with Run(tmp_path):
            gateway, url = await begun(tmp_path)
        port = int(url.rpartition(":")[2])
        for number in range(rounds):
            asking = [asyncio.create_task(ask(port)) for _ in range(clients)]
            for answers in (number * clients + 1 + clients * number // rounds, (number + 1) * clients):
                async with Run(tmp_path):
                    while await said(gateway) != "the run goes on":
                        pass
                    back.set()
                    while seen["200"] < answers:
                        await asyncio.sleep(0)
                    back.clear()
            await asyncio.gather(*asking)
        gateway.kill()
        await ended(gateway)

    back = asyncio.Event()
    asyncio.run(main())
    assert seen["200"] == rounds * clients and seen["503"]


@pytest.mark.slow
def test_two_thousand_connections_are_the_runs_own(tmp_path: Path) -> None:
    """Each is answered, and answered again after the gateway is killed."""

    async def main() -> list[list[bytes]]:
        allow_files()
        async with Run(tmp_path):
            gateway, url = await begun(tmp_path)
            port = int(url.rpartition(":")[2])
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2000)]
            statuses: list[list[bytes]] = []
            for _ in range(2):
                for _, writer in connections:
                    writer.write(HEALTH)
                statuses.append([(await reader.readuntil(b"{}"))[9:12] for reader, _ in connections])
                if gateway.returncode is None:
                    gateway.kill()
                    await ended(gateway)
            for _, writer in connections:
                writer.close()
        return statuses

    assert asyncio.run(main()) == [[b"200"] * 2000] * 2
