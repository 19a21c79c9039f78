"""A command that a signal ends closes its parts, or ends at once if that takes too long."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparring.launch.ending import SIGNALS, STATUS, WITHIN_S

START = """
import asyncio, itertools, signal, sys
from sparring.cli.main import guarded
from sparring.launch.block import block
from sparring.launch.ending import Ending

def never_ends():
    print("closing", flush=True)
    all(n == 0 for n in itertools.repeat(0))

async def work():
    try:
        {held}
    finally:
        await asyncio.sleep(0)
        {closing}

{before}
sys.exit(guarded(lambda: block(work()), "sparring run a.toml", Ending({within_s})))
"""
WAITS = 'print("begun", flush=True); await asyncio.Event().wait()'
IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


def begun(
    held: str = WAITS,
    closing: str = 'print("cleaned up", flush=True)',
    before: str = "",
    within_s: float = WITHIN_S,
    verb: str = "run",
) -> subprocess.Popen[str]:
    """A command whose work has begun."""
    code = START.format(held=held, closing=closing, before=before, within_s=within_s)
    words = [sys.executable, "-c", code.replace("sparring run", f"sparring {verb}")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("before", ["", IGNORED], ids=["", "with Ctrl-C ignored"])
def test_a_signal_lets_the_work_clean_up(number: signal.Signals, before: str) -> None:
    with begun(before=before) as process:
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (STATUS, "cleaned up\n")
    assert error == f"\nended by {number.name}; the same command goes on where it stopped: sparring run a.toml\n"


def test_a_signal_ends_work_that_blocks_the_loop() -> None:
    with begun('print("begun", flush=True); all(n == 0 for n in itertools.repeat(0))') as process:
        process.send_signal(signal.SIGTERM)
        assert (process.communicate(timeout=60)[0], process.returncode) == ("cleaned up\n", STATUS)


def test_a_second_signal_ends_at_once_and_leaves_no_shared_memory() -> None:
    """Although closing would never end."""
    publishes = (
        "import os; from sparring.weights import shared_memory; "
        "(shared_memory.FOLDER / f'{shared_memory.PREFIX}{os.getpid()}-0').touch()"
    )
    with begun(closing="never_ends()", before=publishes) as process:
        [file] = Path("/dev/shm").glob(f"sparring-weights-{process.pid}-*")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "closing\n"
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
