"""Flags of a command are what the box saw: no signal, status or exception of a program's own is taken for a limit."""

from __future__ import annotations

from typing import Any

import pytest
from boxed_program import run_program

from sparring.types import ExecResult

MB = 1 << 20
FORGERIES = {
    "SIGXCPU": "os.kill(os.getpid(), signal.SIGXCPU)",
    "SIGRTMAX": "os.kill(os.getpid(), signal.SIGRTMAX)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGRTMAX of a child": "os.fork() or os.kill(os.getpid(), signal.SIGRTMAX)\nos.wait()\nsys.exit(1)",
    "SIGRTMAX by its session": "os.killpg(0, signal.SIGRTMAX)",
    "a timer": "signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)\nwhile True: pass",
    "its own limit of processor time": "resource.setrlimit(resource.RLIMIT_CPU, (0, 1))\nwhile True: pass",
    "its own limit of memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\nbytearray(1 << 26)",
    "MemoryError": "raise MemoryError",
    "status 137": "os._exit(137)",
    "status 152": "os._exit(152)",
    "status 192": "os._exit(192)",
    "words of a limit": "sys.stderr.write('MemoryError\\n')\nsys.exit(1)",
}
HEAD = "import os, resource, signal, sys\n"
PYTHON = ("/usr/bin/python3", "-S", "-c")
HOG = "x = []\nwhile True: x.append(b'x' * (1 << 20))"


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_limit_cannot_be_forged(in_box: Any, forgery: str) -> None:
    async def work(box: Any) -> list[ExecResult]:
        code = HEAD + FORGERIES[forgery]
        return [await box.python(code), await box.exec([*PYTHON, code]), await run_program(box, [*PYTHON, code])]

    for result in in_box(work, memory_bytes=256 * MB):
        assert (result.timed_out, result.out_of_memory, result.exit_code != 0) == (False, False, True)


def test_what_the_box_saw_is_told(in_box: Any) -> None:
    async def work(box: Any) -> list[ExecResult]:
        return [await box.python(HOG), await run_program(box, [*PYTHON, HOG])]

    for result in in_box(work, memory_bytes=64 * MB):
        assert (result.timed_out, result.out_of_memory) == (False, True)


def test_a_limit_cannot_be_hidden(in_box: Any) -> None:
    """By a last status of 0, or by a signal that stands for another limit."""
    code = "import signal\nfor n in {*signal.valid_signals()} - {9, 19}: signal.signal(n, lambda *_: __import__('os')._exit(0))"

    async def work(box: Any) -> list[ExecResult]:
        waits = code + "\nwhile True: pass"
        return [
            await box.python(waits, timeout_s=0.2),
            await box.exec([*PYTHON, waits], timeout_s=0.2),
            await run_program(box, [*PYTHON, waits], timeout_s=0.2),
        ]

    for result in in_box(work):
        assert (result.timed_out, result.out_of_memory, result.exit_code) == (True, False, 137)
