"""Screens of terminals whose programs write what they like."""

from __future__ import annotations

from random import Random

import pytest
from refusals import refused_at

from sparring.sandbox.screen import Screen


def hostile(random: Random) -> bytes:
    """A control sequence, or what looks like one."""
    numbers = b";".join(str(random.choice([0, 1, 2, 25, 1049, 99999999])).encode() for _ in range(random.randrange(4)))
    return random.choice(
        [
            b"\x1b[" + random.choice([b"", b"?", b">", b"!"]) + numbers + bytes([random.randrange(0x40, 0x7F)]),
            b"\x1b" + random.randbytes(2),
            b"\x1b]0;" + random.randbytes(5) + b"\x07",
            random.randbytes(10),
        ]
    )


def test_what_a_program_writes_never_ends_the_reading() -> None:
    random = Random(0)
    screen = Screen(80, 24)
    for _ in range(1500):
        screen.feed(hostile(random))
    screen.feed(b"\x1b\\\x18\x1bc")  # ends what was open, and resets
    screen.feed(b"\x1b[?7mnow \x1b[>0;1;2;3;4Mread \x1b[5;5;5;5Aon")
    assert screen.text() == "now read on"


@pytest.mark.parametrize("at", range(1, 12))
def test_a_sequence_in_two_pieces_is_one(at: int) -> None:
    data = "a\x1b[31mé\x1b[1;3Hb".encode()
    screen = Screen(10, 2)
    screen.feed(data[:at])
    screen.feed(data[at:])
    assert screen.text() == "aéb"


def test_a_terminal_answers_where_its_cursor_is() -> None:
    screen = Screen(10, 5)
    assert screen.feed(b"ab\r\n\x1b[6n") == b"\x1b[2;1R"
    assert screen.feed(b"ab") == b""


def test_a_size_that_no_terminal_has_is_refused() -> None:
    with refused_at("terminal.columns", "1 to 1000"):
        Screen(0, 24)
    screen = Screen(80, 24)
    with refused_at("terminal.rows", "1 to 1000"):
        screen.resize(80, 0)
