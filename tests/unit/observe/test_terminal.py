"""What a terminal is sent."""

from __future__ import annotations

import io

import pytest

from sparring.observe.terminal import printable, say


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\x1b[2Jb\r\tc\n", "a\\x1b[2Jb\\r\tc\n"),
        ("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07"),
        ("\x9b31m", "\\x9b31m"),  # an escape sequence in one character
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("\udc80", "\\udc80"),
        ("\x08\x7f\x00", "\\x08\\x7f\\x00"),
        ("žluťoučký 🐎 数", "žluťoučký 🐎 数"),
        ("\\x1b", "\\x1b"),
    ],
)
def test_control_characters_are_written_out(text: str, written: str) -> None:
    assert printable(text) == written
    assert printable(written) == written


def test_say_writes_a_line() -> None:
    stream = io.StringIO()
    say("a\x1bb", stream=stream)
    say("c", stream=stream, end="")
    assert stream.getvalue() == "a\\x1bb\nc"
