"""Limits that the policy's own commands hit: each is an observation, and the box serves on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.types import BoxSpec

MB = 1 << 20
AFTER = "import os; print([n for n in os.listdir('/proc') if n.isdigit()] == ['1', str(os.getpid())])"
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
EDGE = """
import os, threading, time
def one(): pass
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(3600)
        count += 1
except BlockingIOError:
    print(count)
"""
HOGS = {
    "one list": "x = []\nwhile True: x.append('a' * 10**6)",
    "one string": "x = 'a' * 10**10",
    "shared mapping": "import mmap\nx = [mmap.mmap(-1, 50 << 20) for _ in range(1000)]",
    "deep structure": "x = [0]\nwhile True: x = x + x",
}


def test_a_fork_bomb_ends_with_its_command(bench: Any) -> None:
    async def work(box: Any) -> Any:
        return await box.python(FORK_BOMB), await box.python(AFTER, timeout_s=20.0)

    bomb, after = bench.box(work, BoxSpec(timeout_s=1.0))
    assert bomb.timed_out
    assert after.stdout == "True\n"


def test_the_number_of_processes_is_the_box_s_own(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> list[str]:
        taken = [await boxes.take(BoxSpec(timeout_s=20.0, processes=8)) for _ in range(4)]
        return [result.stdout for result in await asyncio.gather(*(box.python(EDGE) for box in taken))]

    assert bench.run(work) == ["7\n"] * 4


def test_threads_count_as_processes(bench: Any) -> None:
    code = "import threading\nfor n in range(100): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    result = bench.python(code, processes=8)
    assert (result.exit_code, "can't start new thread" in result.stderr) == (1, True)


SEEN = {"one list": True, "one string": False, "shared mapping": False, "deep structure": True}
"""Whether the box saw the memory that a hog held; what is asked for at once and refused was never held."""


@pytest.mark.parametrize("hog", HOGS)
def test_memory_is_bounded(bench: Any, hog: str) -> None:
    async def work(box: Any) -> Any:
        return await box.python(HOGS[hog]), await box.python(AFTER)

    result, after = bench.box(work, BoxSpec(timeout_s=20.0, memory_bytes=64 * MB))
    assert result.exit_code != 0
    assert result.out_of_memory is SEEN[hog]
    assert result.out_of_memory or result.stderr.endswith(("MemoryError\n", "Cannot allocate memory\n"))
    assert not result.timed_out
    assert after.stdout == "True\n"


def test_processes_cannot_share_out_more_memory_than_the_box_has(bench: Any) -> None:
    code = (
        "import os, time\nfor n in range(8):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (48 << 20)\n"
        "        time.sleep(3600)\ntime.sleep(3600)"
    )
    result = bench.python(code, memory_bytes=64 * MB)
    assert (result.out_of_memory, result.timed_out, result.exit_code) == (True, False, 137)


WITHIN = {
    "less memory than it may": ("print(len(bytearray(40 << 20)))", {"memory_bytes": 64 * MB}, f"{40 * MB}\n"),
    "a memory error that it handles": ("try: 'a' * 10**10\nexcept MemoryError: print('handled')", {}, "handled\n"),
    "a disk over all folders and files": (
        "import os\ntotal = 0\ntry:\n    for n in range(100):\n        for folder in ('/box', '/tmp', '/dev/shm'):\n"
        "            total += open(f'{folder}/{n}', 'wb', buffering=0).write(bytes(1 << 18))\n"
        "except OSError as error:\n    print(error.strerror)\nprint(total <= 4 << 20)\n",
        {"disk_bytes": 4 * MB},
        "No space left on device\nTrue\n",
    ),
    "many empty files": (
        "try:\n    for n in range(10**5): open(f'f{n}', 'w').close()\nexcept OSError as e: print(n < 2000, e.strerror)",
        {"disk_bytes": 4 * MB},
        "True No space left on device\n",
    ),
    "output that is read after its end": ("import os; os.write(1, b'x' * 60000)", {"output_bytes": 60000}, "x" * 60000),
}


@pytest.mark.parametrize("what", WITHIN)
def test_a_command_within_its_limits_goes_on(bench: Any, what: str) -> None:
    code, spec, said = WITHIN[what]
    result = bench.python(code, **spec)
    assert (result.stdout, result.exit_code, result.out_of_memory) == (said, 0, False)


def test_one_file_is_bounded(bench: Any) -> None:
    result = bench.python("import os; os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 10**10)", disk_bytes=4 * MB)
    assert "File too large" in result.stderr


def test_endless_output_is_bounded_and_ends(bench: Any) -> None:
    async def work(box: Any) -> Any:
        endless = await box.python("while True: print('x' * 1000)"), await box.exec(["yes"])
        return *endless, await box.python("print(1)", timeout_s=20.0)

    code, program, after = bench.box(work, BoxSpec(timeout_s=0.5, output_bytes=1000))
    for result in (code, program):
        told = f"\n[{result.missing_bytes} bytes missing]\n"
        assert (result.truncated, result.timed_out, len(result.stdout)) == (True, True, 1000 + len(told))
        assert told in result.stdout
    assert after.stdout == "1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import signal\nfor n in {*signal.valid_signals()} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
        "import os, time\nos.fork(); os.setsid() if os.fork() == 0 else 0\ntime.sleep(3600)",
        "import os; os.mkfifo('f'); open('f')",
        "import time\ntry: time.sleep(3600)\nfinally: time.sleep(3600)",
    ],
    ids=["stops itself", "ignores all signals", "closes its output", "forks", "waits for a writer", "does not let go"],
)
def test_a_command_that_does_not_end_is_ended(bench: Any, code: str) -> None:
    async def work(box: Any) -> Any:
        return await box.python(code), await box.python(AFTER, timeout_s=20.0)

    stuck, after = bench.box(work, BoxSpec(timeout_s=0.3))
    assert (stuck.timed_out, stuck.exit_code) == (True, 137)
    assert after.stdout == "True\n"


def test_a_daemon_dies_with_the_command_that_left_it(bench: Any) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        open('ready', 'w').close()\n        time.sleep(3600)\n    os._exit(0)\n"
        "os.wait()\nwhile not os.path.exists('ready'): pass\nprint(len(os.listdir('/proc')))"
    )
    assert bench.python(daemon, daemon).stdout == "5\n"  # self, thread-self, 1, the command, the daemon
    assert bench.python(daemon, AFTER).stdout == "True\n"


def test_deep_recursion_hits_pythons_own_limit(bench: Any) -> None:
    result = bench.python("def f(n): return 1 + f(n + 1)\nf(0)")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1,
        "RecursionError: maximum recursion depth exceeded",
    )
    assert bench.python("def f(n): return n and 1 + f(n - 1)\nprint(f(990))").stdout == "990\n"
    code = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr([self])\nrepr(A())"
    crash = bench.python(code)
    assert crash.exit_code in (1, 139)
