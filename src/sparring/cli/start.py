"""Entry point that handles Ctrl-C from the first line: one line of output and status 130."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Run the `sparring` program and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if the parent process ignores SIGINT
        signal.signal(signal.SIGINT, _leave)
    from sparring.cli.main import main as verbs

    signal.signal(signal.SIGINT, before)
    return verbs()


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once on a signal: nothing is open yet, and an exception inside an import would print a traceback."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)
