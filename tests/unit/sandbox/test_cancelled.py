"""Callers that are cancelled, or close a box, in the middle of something: nothing is lost and nothing lives on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparring.errors import SandboxError
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec

SPEC = BoxSpec(timeout_s=20.0)
TURNS = (0, 1, 2, 3, 5, 8, 13, 21)
"""Turns of the event loop after which a caller is cancelled."""


async def cancelled_after(turns: int, work: Any) -> None:
    task = asyncio.create_task(work)
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def cancelled_twice(turns: int, work: Any) -> None:
    task = asyncio.create_task(work)
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)


def test_a_cancelled_snapshot_takes_no_file_from_the_next(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> list[set[str]]:
        found = []
        for turns in TURNS:
            box = await boxes.take(SPEC)
            await box.write("before", b"x")
            await cancelled_after(turns, box.snapshot())
            await box.write("after", b"x")
            fork = await box.fork(await box.snapshot())
            found.append(set(await fork.entries()))
            for one in (fork, box):
                await one.close()
        return found

    assert bench.run(work) == [{"before", "after"}] * len(TURNS)


@pytest.mark.parametrize("word", ["start", "shell", "terminal", "exec"])
def test_a_cancelled_beginning_leaves_no_process(bench: Any, word: str) -> None:
    async def work(box: Any) -> list[str]:
        await box.exec(["true"])
        for turns in TURNS:
            await cancelled_after(turns, box.shell() if word == "shell" else getattr(box, word)(["sleep", "1000"]))
        kept = await box.snapshot()  # which is refused beside what lives on
        return list(kept.processes)

    assert bench.box(work) == []


def test_a_box_that_is_closed_while_it_starts_is_closed(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> tuple[list[Any], set[object]]:
        results: list[Any] = []
        left: set[object] = set()
        for turns in range(8):
            box = await boxes.take(SPEC)
            running = asyncio.create_task(box.exec(["sleep", "1000"]))
            for _ in range(turns):
                await asyncio.sleep(0)
            await box.close()
            results += await asyncio.gather(running, return_exceptions=True)
            left.add(box.commands.group)
        return results, left

    results, left = bench.run(work)
    assert {type(result) for result in results} == {SandboxError}
    assert left == {None}


def test_what_begins_as_another_ends_is_not_taken_for_it(family: Callable[[int], list[int]]) -> None:
    """A command ends, is given up, and the next one begins, all while the box does not look: the files of the next have
    the numbers of the first one's."""

    async def main() -> str:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1, grace_s=20.0))
        box = await boxes.take(SPEC)
        first = asyncio.create_task(box.exec(["sleep", "1000"]))
        while not (commands := [pid for pid in family(os.getpid()) if sleeps(pid)]):
            await asyncio.sleep(0)
        inner = int(Path(f"/proc/{commands[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(inner, signal.SIGSTOP)
        os.kill(commands[0], signal.SIGKILL)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(box.exec(["sleep", "1000"], timeout_s=0.2))
        for _ in range(5):
            await asyncio.sleep(0)
        os.kill(inner, signal.SIGCONT)
        result = await second
        await boxes.close()
        return result.end

    assert asyncio.run(main()) == "timed out"


def sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except OSError:  # it has just ended
        return False


def test_a_verifier_cancelled_twice_leaves_no_box(bench: Any) -> None:
    """Once while it begins, and again while it is closed for that."""

    async def work(box: Any) -> tuple[int, int]:
        await box.write("answer", bytes(1 << 20))
        await box.snapshot()

        async def open_files() -> int:
            for _ in range(2):  # after every other one, whose layers these borrow; both servers have started then
                await (await box.verifier(["answer"])).close()
            return len(os.listdir("/proc/self/fd"))

        before = await open_files()
        for turns in TURNS:
            await cancelled_twice(turns, box.verifier(["answer"]))
        after = await open_files()
        return before, after

    before, after = bench.box(work)
    assert after == before


def test_a_conversation_cancelled_twice_leaves_no_box(bench: Any) -> None:
    """Both boxes end, also where the wait for the first is given up."""

    async def work(boxes: BubblewrapBoxes) -> tuple[int, int]:
        box = await boxes.take(SPEC)

        async def open_files() -> int:
            for _ in range(2):  # both servers have started then
                await box.converse("1", "1")
            return len(os.listdir("/proc/self/fd"))

        before = await open_files()
        for turns in TURNS:
            await cancelled_twice(turns, box.converse("while True: pass", "while True: pass"))
        after = await open_files()
        await box.close()
        return before, after

    before, after = bench.run(work)
    assert after == before
