"""A coroutine from plain code, in a running loop and without one; Ctrl-C also where it holds its own loop up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import traceback

import pytest

from sparring.launch.block import block

START = """
import asyncio, itertools, signal, time
from sparring.launch.block import block

async def work():
    try:
        {held}
    finally:
        await asyncio.sleep(0)
        await asyncio.to_thread(print, "cleaned up", flush=True)

try:
    block(work())
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
HELD = {
    "by a line that never returns": 'print("begun", flush=True); all(n == 0 for n in itertools.repeat(0))',
    "by a sleep": 'print("begun", flush=True); time.sleep(600)',
    "by a wait": 'print("begun", flush=True); await asyncio.Event().wait()',
}


@pytest.mark.parametrize("held", HELD)
def test_ctrl_c_ends_what_is_held_up_and_lets_it_clean_up(held: str) -> None:
    code = START.format(held=HELD[held])
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read().splitlines() == ["cleaned up", "interrupted True"]
    assert process.wait() == 0


async def fails() -> None:
    raise ZeroDivisionError


def test_an_error_is_the_first_thing_of_its_traceback() -> None:
    """Without a loop, and within one as in a notebook."""

    async def inside() -> None:
        block(fails())

    for call in (lambda: block(fails()), lambda: asyncio.run(inside())):
        with pytest.raises(ZeroDivisionError) as raised:
            call()
        assert "no running event loop" not in "".join(traceback.format_exception(raised.value))
