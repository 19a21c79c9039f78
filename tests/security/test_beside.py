"""Commands that attack what runs beside them in their box: other commands, file operations, the box's own process. None
of it is a failure of the machine, which would be tried again and never scored (law 6)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from sparring.errors import PolicyFailure, SpoiltFile

SIGNALLER = """
import os, sys
spared, last = {os.getpid(), os.getppid()}, os.getpid()
print("begun", flush=True)
while True:
    for pid in range(max(2, last - 2), last + 4):
        if pid not in spared:
            try: os.kill(pid, int(sys.argv[1])); last = max(last, pid)
            except OSError: pass
"""
"""Signals every process that begins, before it is confined too. It spares its reaper, with which it would end."""

OPENER = """
import os
last = os.getpid()
print("begun", flush=True)
while True:
    for pid in range(last, last + 3):
        for number in (210, 211):
            try: place = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH)
            except OSError: continue
            os.fchdir(place)
            print("opened", os.listdir("."), flush=True)
        if os.path.exists(f"/proc/{pid}"): last = pid
"""
"""Opens the descriptors of commands that begin: a fork of the box has its own."""

TERMINALS = """
import os, time
held = []
try:
    while True: held.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError: print("begun", flush=True)
time.sleep(60)
"""


UNDER_WAY = """
import os, socket, time
held, file = [], os.open("/dev/null", os.O_RDONLY)
try:
    while True:
        held.append(socket.socketpair())
        held[-1][0].setblocking(False)
        try:
            while True: socket.send_fds(held[-1][0], [b"x"], [file] * 253)
        except BlockingIOError: pass
except OSError: print("begun", flush=True)
time.sleep(60)
"""
"""As many descriptors in sockets as the kernel lets a command put there; it counts those of all boxes together."""

HELD = {
    "by a lease": """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.close(os.open("answer", os.O_CREAT))
fcntl.fcntl(os.open("answer", os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("begun", flush=True)
time.sleep(60)
""",
    "as a program that runs": """
import shutil, subprocess, time
shutil.copy("/usr/bin/sleep", "answer")
held = subprocess.Popen(["./answer", "60"])
print("begun", flush=True)
time.sleep(60)
""",
    "in a folder that goes": """
import os, shutil
print("begun", flush=True)
while True:
    os.makedirs("folder", exist_ok=True)
    shutil.rmtree("folder", ignore_errors=True)
""",
}


async def begun(box: Any, code: str, *arguments: str) -> Any:
    process = await box.start(["python3", "-c", code, *arguments])
    while "begun" not in (await process.output()).stdout:
        await asyncio.sleep(0)
    return process


def test_one_that_kills_all_others_is_no_failure_of_the_box(in_box: Any) -> None:
    async def work(box: Any) -> set[str]:
        await box.write("file", b"x")
        await box.exec(["true"])
        killer = await begun(box, SIGNALLER, "9")
        ends = {(await box.exec(["sleep", "1"])).end for _ in range(5)}
        for operation in (box.read("file"), box.write("file", b"x"), box.download(), box.entries(), box.upload({})):
            with suppress(SpoiltFile):
                await operation
        with suppress(PolicyFailure):
            await (await box.shell()).run("sleep 1")
        await killer.kill()
        assert (await box.read("file"), (await box.exec("echo on")).stdout) == (b"x", "on\n")
        return ends

    assert in_box(work) <= {"signalled", "killed"}


def test_one_that_interrupts_all_others_is_no_failure_of_the_box(in_box: Any) -> None:
    """Of SIGINT Python makes an exception, also in a command that is not confined yet."""

    async def work(box: Any) -> str:
        await box.write("file", bytes(1 << 20))
        killers = [await box.start(["python3", "-c", SIGNALLER, "2"]) for _ in range(4)]
        for _ in range(40):
            for operation in (box.read("file"), box.python("1"), box.entries(), box.start("true")):
                with suppress(PolicyFailure):
                    await operation
        for killer in killers:
            await killer.close()
        return str((await box.exec("echo on")).stdout)

    assert in_box(work) == "on\n"


@pytest.mark.full  # waits for the time limit of a file operation
def test_one_that_stops_all_others_holds_up_none_for_ever(in_box: Any) -> None:
    async def work(box: Any) -> str:
        await box.write("file", b"x")
        await box.exec(["true"])
        await begun(box, SIGNALLER, "19")
        with suppress(SpoiltFile):  # which it may be too slow for
            await box.read("file")
        with suppress(PolicyFailure):
            await box.shell()
        return str((await box.exec(["sleep", "1"], timeout_s=0.2)).end)

    assert in_box(work) == "timed out"


@pytest.mark.parametrize("image", ["python", pytest.param("host", marks=pytest.mark.full)])
def test_no_command_opens_what_a_beginning_one_holds(in_box: Any, image: str) -> None:
    """Between its fork and its program a command has the box's descriptors; by one of them its layers could be
    rewritten, those of prepared snapshots too. In the worst of ten tries this was seen at the tenth command."""

    async def work(box: Any) -> str:
        opener = await begun(box, OPENER)
        for number in range(20):
            await (box.exec(["true"]) if number % 2 else box.write("file", b"x"))
        return str((await opener.kill()).stdout)

    assert in_box(work, image=image) == "begun\n"


def test_terminals_that_commands_took_are_missing_to_them_alone(in_box: Any) -> None:
    async def work(box: Any) -> str:
        await begun(box, TERMINALS)
        with pytest.raises(PolicyFailure):
            await box.terminal(["cat"])
        other = await box.fresh()
        terminal = await other.terminal(["echo", "shown"])
        await terminal.shows("shown", 20)
        text = terminal.screen()
        await other.close()
        assert (await box.exec("echo on")).stdout == "on\n"
        return str(text)

    assert in_box(work) == "shown"


def test_descriptors_under_way_end_no_other_box(in_box: Any) -> None:
    async def work(box: Any) -> list[str]:
        other = await box.fresh()
        await other.write("file", b"x")
        await begun(box, UNDER_WAY)
        fork = await other.fork(await other.snapshot())
        third = await box.fresh()
        said = [(await one.exec(["sh", "-c", "echo on; cat file"])).stdout for one in (fork, other, third)]
        for one in (fork, other, third):
            await one.close()
        return said

    assert in_box(work) == ["on\nx", "on\nx", "on\n"]


@pytest.mark.parametrize("how", HELD)
def test_a_file_that_a_command_holds_is_the_policys_failure(in_box: Any, how: str) -> None:
    async def work(box: Any) -> None:
        await box.exec(["true"])
        await begun(box, HELD[how])
        with pytest.raises(SpoiltFile):
            for _ in range(300):
                await box.write("folder/answer" if "folder" in how else "answer", b"x")

    in_box(work)
