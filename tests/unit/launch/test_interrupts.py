"""Work in an event loop that Ctrl-C or a signal ends: it cleans up, or the process ends at once if that takes too
long."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparring.launch.interrupts import SIGNALS, STATUS, WITHIN_S, block

START = """
import asyncio, itertools, signal, sys, time
from sparring.cli.main import guarded
from sparring.launch.interrupts import Ending, block

def never_ends():
    print("closing", flush=True)
    all(n == 0 for n in itertools.repeat(0))

async def work():
    print("begun", flush=True)
    try:
        {action}
    finally:
        await asyncio.sleep(0)
        await asyncio.to_thread(print, "cleaned up", flush=True)
        {closing}

{before}
status = guarded(lambda: block(work()), "sparring run a.toml", Ending({within_s}))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
sys.exit(status)
"""
WAITS = "await asyncio.Event().wait()"
NEVER_RETURNS = "all(n == 0 for n in itertools.repeat(0))"
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
ENDED = "cleaned up\nTrue\n"


@contextmanager
def begun(
    action: str = WAITS, closing: str = "", before: str = "", within_s: float = WITHIN_S, verb: str = "run"
) -> Iterator[subprocess.Popen[str]]:
    """A command whose work has begun. Killed at the end if it still runs."""
    code = START.format(action=action, closing=closing, before=before, within_s=within_s)
    words = [sys.executable, "-c", code.replace("sparring run", f"sparring {verb}")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("action", [NEVER_RETURNS, "time.sleep(600)", WAITS])
def test_ctrl_c_ends_what_is_held_up_and_lets_it_clean_up(action: str) -> None:
    with begun(action) as process:
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=60)[0], process.returncode) == (ENDED, 130)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("action", "before"), [(WAITS, ""), (WAITS, IGNORED), (NEVER_RETURNS, "")], ids=["", "Ctrl-C ignored", "held up"]
)
def test_a_signal_lets_the_work_clean_up(number: signal.Signals, action: str, before: str) -> None:
    with begun(action, before=before) as process:
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()[0]) == (STATUS, "cleaned up")
    assert error == f"\nended by {number.name}; the same command goes on where it stopped: sparring run a.toml\n"


def test_a_second_signal_ends_at_once_and_leaves_no_shared_memory() -> None:
    """Although closing would never end."""
    publishes = (
        "import os; from sparring.weights import shared_memory; "
        "(shared_memory.FOLDER / f'{shared_memory.PREFIX}{os.getpid()}-0').touch()"
    )
    with begun(closing="never_ends()", before=publishes) as process:
        [file] = Path("/dev/shm").glob(f"sparring-weights-{process.pid}-*")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["cleaned up\n", "closing\n"]
        process.send_signal(signal.SIGUSR1)
        assert "the same command goes on" in process.communicate(timeout=60)[1]
    assert process.returncode == STATUS and not file.exists()


def test_closing_has_a_deadline() -> None:
    with begun(closing="never_ends()", within_s=0.01) as process:
        process.send_signal(signal.SIGTERM)
        assert "the same command goes on" in process.communicate(timeout=60)[1]
    assert process.returncode == STATUS


def test_a_verb_that_does_not_go_on_is_ended_as_ever() -> None:
    with begun(verb="check") as process:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_an_error_is_the_first_thing_of_its_traceback() -> None:
    """Without a loop, and within one as in a notebook."""

    async def fails() -> None:
        raise ZeroDivisionError

    async def inside() -> None:
        block(fails())

    for call in (lambda: block(fails()), lambda: asyncio.run(inside())):
        with pytest.raises(ZeroDivisionError) as raised:
            call()
        assert "no running event loop" not in "".join(traceback.format_exception(raised.value))
