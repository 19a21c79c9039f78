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


@pytest.mark.full  # waits for the time limit of a file operation
def test_one_that_stops_all_others_holds_up_none_for_ever(in_box: Any) -> None:
    async def work(box: Any) -> str:
        await box.write("file", b"x")
        await box.exec(["true"])
        await begun(box, SIGNALLER, "19")
        with pytest.raises(SpoiltFile):
            await box.read("file")
        with pytest.raises(PolicyFailure):
            await box.shell()
        return (await box.exec(["true"], timeout_s=0.2)).end

    assert in_box(work) == "timed out"


@pytest.mark.parametrize("image", ["python", "host"])
def test_no_command_opens_what_a_beginning_one_holds(in_box: Any, image: str) -> None:
    """Between its fork and its program a command has the box's descriptors; by one of them its layers could be
    rewritten, those of prepared snapshots too. In the worst of ten tries this was seen at the tenth command."""

    async def work(box: Any) -> str:
        opener = await begun(box, OPENER)
        for number in range(40):
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
