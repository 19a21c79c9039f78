"""The program's first lines: Ctrl-C is one line and status 130 before there is anything that could handle it."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Run the `sparring` program and return its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where whoever started us has it ignored
        signal.signal(signal.SIGINT, _leave)
    from sparring.cli.main import main as verbs

    signal.signal(signal.SIGINT, before)
    return verbs()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once on a signal: nothing has been opened yet, and an exception inside an import would print its
    traceback."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)
