"""What the kernel counts for all boxes together: a box that uses it up harms no other box's own process."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from boxed_program import run_program

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.commands import BOX_FILES, most_files
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.requests import LEAST_FILES
from sparring.types import BoxSpec

IN_FLIGHT = """
import os, socket, time
files, kept = [os.open("/dev/null", 0)] * 250, []
try:
    while True:
        kept += (pair := socket.socketpair())
        pair[0].setblocking(False)
        try:
            while True: socket.send_fds(pair[0], [b"x"], files)
        except BlockingIOError: pass
except OSError as error:
    print("full", error.errno, flush=True)
time.sleep(3600)
"""
PIPES = """
import fcntl, os, time
kept = []
try:
    while True: kept.append(os.pipe())
except OSError as error:
    print("full", error.errno, fcntl.fcntl(kept[-1][0], 1032), flush=True)
time.sleep(3600)
"""
PASSES = "import socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0]); print(len(socket.recv_fds(b, 1, 1)[1]))"
SERVES = "import socket; s = socket.create_server(('127.0.0.1', 8001)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
MB = 1 << 20


async def beside(code: str, processes: int, work: Callable[[Any, Any], Awaitable[None]]) -> None:
    """Run `work` with a box, and another pool's box, beside a box in which processes run `code` until it is full."""
    boxes = BubblewrapBoxes(SandboxConfig(servers=1), {})
    other = BubblewrapBoxes(SandboxConfig(servers=1), {})
    try:
        box = await boxes.take(BoxSpec(timeout_s=20.0))
        assert (await box.exec("echo on")).stdout == "on\n"
        hog = await boxes.take(BoxSpec(timeout_s=20.0, processes=40))
        for _ in range(processes):
            process = await hog.start(["python3", "-c", code])
            while "full" not in (told := await process.output()).stdout:
                assert told.end == "running", told
        await work(box, await other.take(BoxSpec(timeout_s=20.0)))
    finally:
        await boxes.close()
        await other.close()


async def harmless(box: Any, fresh: Any) -> None:
    """All that passes descriptors, or needs pipes: in a box that runs, and in one that starts now."""
    await box.write("file", b"kept")
    for one in (box, fresh):
        assert (await one.exec("head -c 1000000 /dev/zero | wc -c")).stdout == "1000000\n"
        fork = await one.fork(await one.snapshot())
        assert (await fork.exec("echo on")).stdout == "on\n"
        process = await one.start(["python3", "-c", SERVES])
        while "up" not in (told := await process.output()).stdout:
            assert told.end == "running", told
        with await one.connect(8001) as link:
            link.setblocking(True)
            assert link.recv(9) == b"hello"
        assert (await run_program(one, ["echo", "ran"], environment={"PATH": "/usr/bin"})).stdout == "ran\n"
        talk = await one.converse("import os; print(os.read(200, 9))", "import os; os.write(201, b'x')")
        assert talk.stdout == "b'x'\n"
        await fork.close()


@pytest.mark.parametrize("hog", [IN_FLIGHT, pytest.param(PIPES, marks=pytest.mark.full)], ids=["in flight", "pipes"])
def test_what_one_box_uses_up_ends_no_other_box(hog: str) -> None:
    asyncio.run(beside(hog, 1 if hog is IN_FLIGHT else 16, harmless))


@pytest.mark.full
def test_commands_of_others_are_stopped_from_passing_descriptors_which_is_said() -> None:
    """The count is the kernel's, of the host's user: docs/limits.md. Where this test fails, that page can say less."""

    async def work(box: Any, fresh: Any) -> None:
        assert "Too many references" in (await box.python(PASSES)).stderr

    asyncio.run(beside(IN_FLIGHT, 1, work))


def test_a_box_s_own_limit_is_far_above_its_commands() -> None:
    """Below a low limit of the run, commands get half of it."""
    assert most_files(True) == (BOX_FILES, 4096) or resource.getrlimit(resource.RLIMIT_NOFILE)[1] < BOX_FILES
    code = "from sparring.sandbox.commands import most_files; print(most_files(True), most_files(False))"
    assert under_limit(3000, code).stdout == "(3000, 1500) (3000, 256)\n"


def under_limit(files: int, code: str) -> subprocess.CompletedProcess[str]:
    line = ["bash", "-c", f'ulimit -n {files} && exec {sys.executable} -c "{code}"']
    return subprocess.run(line, capture_output=True, text=True)


def test_a_limit_below_what_a_box_itself_needs_is_refused() -> None:
    said = under_limit(LEAST_FILES - 1, "from sparring.sandbox.check import check_sandbox; check_sandbox()").stderr
    assert (
        f"sandbox: expected a hard limit of {LEAST_FILES} open files or more, got {LEAST_FILES - 1}; do: ulimit" in said
    )


FULL = """
import asyncio
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.requests import LEAST_FILES
from sparring.types import BoxSpec

async def main():
    boxes = BubblewrapBoxes(SandboxConfig(servers=1), {})
    box = await boxes.take(BoxSpec(timeout_s=20.0))
    shells = [await box.shell() for _ in range(63)]
    print((await box.exec(['echo', 'on'])).stdout, end='')
    for shell in shells: await shell.close()
    for number in range(200): kept = await box.snapshot()
    print((await (await box.fork(kept)).exec(['echo', 'fork'])).stdout, end='')
    await boxes.close()

asyncio.run(main())
"""


@pytest.mark.full
def test_under_the_least_limit_a_box_has_room_for_all_that_it_may_hold() -> None:
    done = under_limit(LEAST_FILES, FULL)
    assert done.stdout == "on\nfork\n", done.stderr
