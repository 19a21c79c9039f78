"""Terminal output of the commands and of a run's progress.

Messages quote programs, policies and worlds, and a terminal obeys escape sequences in them: these can write the
clipboard, clear the screen or rename the window.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import TextIO


def printable(text: str) -> str:
    """Return text that cannot control the terminal: control characters other than newline and tab, characters that
    change the direction of text, and characters without an encoding are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print text that may quote a program's output, on `stream` (standard output by default), and `end` after it."""
    print(printable(text) + end, file=stream, end="", flush=True)  # whole, also beside another thread's


class PrintableFormatter(logging.Formatter):
    """Formatter of log messages that may quote a program's output."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message with its traceback, escaped."""
        return printable(super().format(record))


def guard_terminal() -> None:
    """Apply `say`'s escaping to tracebacks and log messages that Python itself writes to standard error."""
    sys.excepthook = _show
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, trace)), stream=sys.stderr, end="")
