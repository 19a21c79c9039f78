"""The terminal: all that the verbs and the progress of a run write to it goes through here.

What programs, policies and worlds say ends in messages, and a terminal obeys what it is sent: an escape sequence writes
its clipboard, clears it or renames it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import TextIO


def printable(text: str) -> str:
    """Return text that cannot steer the terminal: control characters, but for newline and tab, are written out, and so
    is what changes the direction of text or has no encoding."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", *, stream: TextIO | None = None, end: str = "\n") -> None:
    """Write a text that may hold what a program said.

    Args:
        text: one line or several.
        stream: where to; standard output by default.
        end: what follows it.
    """
    print(printable(text), file=stream, end=end, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formatter of messages of logs, which may hold what a program said."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, its traceback included, as it may be written."""
        return printable(super().format(record))


def guard_terminal() -> None:
    """Have tracebacks and messages of logs, which Python itself writes to standard error, written by `say`'s rule."""
    sys.excepthook = _show
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an exception that nobody caught, as Python does."""
    say("".join(traceback.format_exception(kind, error, trace)), stream=sys.stderr, end="")
