"""Entry point that handles Ctrl-C, and the signals that end a run, from the first line: one line of output and the
exit status."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the `sparring` program and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if the parent process ignores SIGINT
        signal.signal(signal.SIGINT, _leave)
    if sys.argv[1:2] in (["run"], ["eval"]):
        for number in (signal.SIGTERM, signal.SIGUSR1):  # until the verb handles them
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _leave)
    from sparring.cli.main import main as verbs

    signal.signal(signal.SIGINT, before)
    return verbs()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once on a signal: nothing is open yet, and an exception inside an import would print a traceback."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130 if number == signal.SIGINT else 75)
