"""Screen of a terminal as text, by pyte (LGPL, which is why it is an extra that is imported when it is used)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby
from types import ModuleType
from typing import Any

from sparring.errors import refusal
from sparring.types.boxes import check_count

SEQUENCE = re.compile(rb"(\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-Z\\-~]))")
"""Control sequence (ECMA-48, section 5.4), or another escape sequence (ISO 2022)."""
MOST_UNENDED = 1 << 14
"""Maximum number of bytes of a sequence without an end, such as the text of a title; a longer one is dropped."""
MOST_COMBINED, MOST_SAVED = 8, 32
"""Maximum numbers of characters in one cell, and of saved cursors."""
MOST_COLUMNS, MOST_ROWS = 1000, 1000


def check_size(columns: int, rows: int) -> None:
    """Refuse a size that no terminal can have.

    Raises:
        BadInput: the number of columns or rows is below 1 or above 1,000.
    """
    for name, value, most in (("columns", columns, MOST_COLUMNS), ("rows", rows, MOST_ROWS)):
        check_count(f"terminal.{name}", value, 1, most)


def _pyte() -> ModuleType:
    try:
        import pyte
    except ImportError as error:
        remedy = "pip install 'sparring[terminal]'"
        raise refusal("terminal", "the package pyte, which reads a screen", "none", remedy) from error
    return pyte


class Screen:
    """Screen with the given numbers of columns and rows.

    Raises:
        BadInput: no terminal can have this size, or pyte is not installed.
    """

    def __init__(self, columns: int, rows: int) -> None:
        check_size(columns, rows)
        pyte = _pyte()
        answers = self._answers = bytearray()

        class Bounded(pyte.Screen):  # type: ignore[misc, name-defined]  # pyte has no types
            """Screen whose memory no program can make grow."""

            def write_process_input(self, data: str) -> None:
                answers.extend(data.encode())

            def save_cursor(self) -> None:
                super().save_cursor()
                del self.savepoints[:-MOST_SAVED]

            def draw(self, data: str) -> None:
                if data.isascii():
                    super().draw(data)
                    return
                for combines, group in groupby(data, unicodedata.combining):
                    text = "".join(group)
                    super().draw(text[: self._room()] if combines else text)

            def _room(self) -> int:
                """Return the room for combining characters in the cell before the cursor."""
                at = self.cursor.x - 1
                line = self.buffer[self.cursor.y if at >= 0 else self.cursor.y - 1]
                return max(0, MOST_COMBINED - len(line[at if at >= 0 else self.columns - 1].data))

        self._screen: Any = Bounded(columns, rows)
        self._stream: Any = pyte.ByteStream(self._screen)
        self._unended = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Show a program's output part by part; yield the terminal's answer to each part. A sequence that pyte cannot
        read shows nothing."""
        for part in SEQUENCE.split(data):
            try:
                self._stream.feed(part)
            except (TypeError, ValueError, LookupError, NameError, AttributeError, AssertionError, StopIteration):
                self._stream._initialize_parser()
            self._unended = 0 if self._stream._taking_plain_text else self._unended + len(part)
            if self._unended > MOST_UNENDED:
                self._stream._initialize_parser()
            yield bytes(self._answers)
            self._answers.clear()

    def resize(self, columns: int, rows: int) -> None:
        """Change the size.

        Raises:
            BadInput: no terminal can have this size.
        """
        check_size(columns, rows)
        self._screen.resize(rows, columns)

    def text(self) -> str:
        """Return the text, without spaces at the ends of lines and without empty lines at its end."""
        lines = (self._screen.buffer[row] for row in range(self._screen.lines))
        texts = ("".join(line[column].data for column in range(self._screen.columns)) for line in lines)
        return "\n".join(text.rstrip() for text in texts).rstrip("\n")
