"""Screen of a terminal as text, by pyte (LGPL, which is why it is an extra that is imported when it is used)."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from sparring.errors import refusal

SEQUENCE = re.compile(rb"(\x1b\[[0-?]*[ -/]*[@-~])")
"""Control sequence (ECMA-48, section 5.4)."""
MOST_COLUMNS, MOST_ROWS = 1000, 1000


def check_size(columns: int, rows: int) -> None:
    """Refuse a size that no terminal has.

    Raises:
        BadInput: fewer than 1, or more than 1,000, columns or rows.
    """
    for name, value, most in (("columns", columns, MOST_COLUMNS), ("rows", rows, MOST_ROWS)):
        if not 1 <= value <= most:
            raise refusal(f"terminal.{name}", f"1 to {most}", repr(value), "80 columns and 24 rows are usual")


def _pyte() -> ModuleType:
    try:
        import pyte
    except ImportError as error:
        do = "pip install 'sparring[terminal]'"
        raise refusal("terminal", "the package pyte, which reads a screen", "none", do) from error
    return pyte


class Screen:
    """Screen of so many columns and rows.

    Raises:
        BadInput: a size that no terminal has, or pyte is not installed.
    """

    def __init__(self, columns: int, rows: int) -> None:
        check_size(columns, rows)
        pyte = _pyte()
        answers = self._answers = bytearray()

        class Answering(pyte.Screen):  # type: ignore[misc, name-defined]  # pyte has no types
            def write_process_input(self, data: str) -> None:
                answers.extend(data.encode())

        self._screen: Any = Answering(columns, rows)
        self._stream: Any = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> bytes:
        """Show what a program writes; return what the terminal answers it. A sequence that pyte cannot read shows
        nothing."""
        for part in SEQUENCE.split(data):
            try:
                self._stream.feed(part)
            except (TypeError, ValueError, LookupError, NameError, AttributeError, AssertionError, StopIteration):
                self._stream._initialize_parser()
        answer = bytes(self._answers)
        self._answers.clear()
        return answer

    def resize(self, columns: int, rows: int) -> None:
        """Change the size.

        Raises:
            BadInput: a size that no terminal has.
        """
        check_size(columns, rows)
        self._screen.resize(rows, columns)

    def text(self) -> str:
        """Return the text, without spaces at the ends of lines and without empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n")
