"""Screens of terminals whose programs write what they like."""

from __future__ import annotations

import tracemalloc
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


def feed(screen: Screen, data: bytes) -> bytes:
    return b"".join(screen.feed(data))


def test_what_a_program_writes_never_ends_the_reading() -> None:
    random = Random(0)
    screen = Screen(80, 24)
    for _ in range(1500):
        feed(screen, hostile(random))
    feed(screen, b"\x1b\\\x18\x1bc")  # ends what was open, and resets
    feed(screen, b"\x1b[?7mnow \x1b[>0;1;2;3;4Mread \x1b[5;5;5;5Aon")
    assert screen.text() == "now read on"


@pytest.mark.parametrize("at", range(1, 12))
def test_a_sequence_in_two_pieces_is_one(at: int) -> None:
    data = "a\x1b[31mé\x1b[1;3Hb".encode()
    screen = Screen(10, 2)
    feed(screen, data[:at])
    feed(screen, data[at:])
    assert screen.text() == "aéb"


def test_a_terminal_answers_where_its_cursor_is() -> None:
    screen = Screen(10, 5)
    assert feed(screen, b"ab\r\n\x1b[6n") == b"\x1b[2;1R"
    assert feed(screen, b"ab") == b""


GROWING = {
    "characters on one cell": ("a" + "\u0301" * 40_000).encode(),
    "a title without end": b"\x1b]2;" + b"x" * 100_000,
    "digits without end": b"\x1b[" + b"1" * 100_000,
    "numbers without end": b"\x1b[" + b"1;" * 50_000,
    "saved cursors": b"\x1b7" * 20_000,
}


@pytest.mark.parametrize("what", GROWING)
def test_what_a_program_writes_leaves_a_screen_of_its_size(what: str) -> None:
    feed(screen := Screen(80, 24), b"a")  # what is made once
    tracemalloc.start()
    feed(screen, GROWING[what])  # in a time that grows with it alone: the first took minutes
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= 1 << 16


def test_half_a_wide_character_ends_no_reading() -> None:
    screen = Screen(10, 2)
    feed(screen, "\u6f22\x1b[1;1H\x1b[1P".encode())
    feed(screen, "\r\n\u6f22\x1b[2;2H\u6f22\x1b[2;1Hx".encode())
    assert screen.text() == "\nx\u6f22"


def test_an_expensive_sequence_is_a_part_of_its_own() -> None:
    """Whoever reads a flood of them pauses between parts, not only between bites."""
    assert len(list(Screen(80, 24).feed(b"\x1b#8" * 20))) >= 20


def test_a_size_that_no_terminal_has_is_refused() -> None:
    with refused_at("terminal.columns", "1 to 1000"):
        Screen(0, 24)
    screen = Screen(80, 24)
    with refused_at("terminal.rows", "1 to 1000"):
        screen.resize(80, 0)
