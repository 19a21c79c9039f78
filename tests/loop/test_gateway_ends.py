"""What `sparring gateway` and its run say to one another when either ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from asyncio.subprocess import Process
from pathlib import Path

import httpx

from sparring.gateway.proxied import proxied
from sparring.gateway.server import gateway_here, open_door
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message

ADDRESS = "http://127.0.0.1:9"
RENDERER = toy_renderer()


async def begun(folder: Path) -> tuple[Process, str]:
    """Start a gateway; return it and where it answers."""
    words = (sys.executable, "-m", "sparring.cli.main", "gateway", str(folder), "--port", "0")
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = await said(process)
    assert line.startswith(f"gateway of {folder} on http://127.0.0.1:"), line
    return process, line.rpartition(" ")[2]


async def said(process: Process) -> str:
    """Return the next line of a gateway."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().rstrip("\n")


async def ended(process: Process) -> tuple[int | None, str, str]:
    """Return the exit status, and what a gateway had still to say."""
    out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


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
        async with proxied(tmp_path, ADDRESS, reports):
            first, _ = await begun(tmp_path)
            second, _ = await begun(tmp_path)
            followed = await ended(first)
            told = reports[1:]
        return followed, await ended(second), told

    followed, over, told = asyncio.run(main())
    assert followed[:2] == (1, "") and "another gateway has begun for this run" in followed[2]
    assert over == (0, f"{tmp_path}: the run is over\n", "")
    assert told == ["a gateway answers programs"] * 2


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
            async with proxied(tmp_path, ADDRESS):
                process, url = await begun(tmp_path)
                raise ConnectionResetError  # as a run ends that is interrupted, or breaks
        except ConnectionResetError:
            lines.append(await said(process))
            await asked(url, "sk-any")
        async with proxied(tmp_path, ADDRESS), open_door(session) as door:
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
        async with proxied(tmp_path, ADDRESS):
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
                await process.wait()
                while gateway_here().there.is_set():
                    await asyncio.sleep(0.01)
        return seen

    assert asyncio.run(main()) == [False, True] * 2


def test_a_run_says_that_its_gateway_has_ended(tmp_path: Path) -> None:
    async def main() -> tuple[list[str], tuple[int | None, str, str]]:
        reports = Reports()
        async with proxied(tmp_path, ADDRESS, reports):
            process, _ = await begun(tmp_path)
            process.send_signal(signal.SIGINT)
            status = await ended(process)
            await reports.until("the gateway has ended; programs wait for the next one")
            process, _ = await begun(tmp_path)
            process.kill()
            await process.wait()
            await reports.until("the gateway has ended; programs wait for the next one")
            return reports[1:], status

    reports, (status, out, error) = asyncio.run(main())
    assert reports == ["a gateway answers programs", "the gateway has ended; programs wait for the next one"] * 2
    assert (status, out) == (130, "") and "Traceback" not in error
