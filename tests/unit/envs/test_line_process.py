"""A program that answers a line with a line: it answers, falls silent, ends, and is ended."""

from __future__ import annotations

import sys

import pytest

from sparring.envs.line_process import LineProcess

PROGRAM = """
import os, sys
for line in sys.stdin:
    if line == "end\\n":
        sys.exit(3)
    if line != "hush\\n":
        print(line.strip()[::-1] + os.environ["MARK"] * 70000, flush=True)
"""


@pytest.fixture
def process() -> LineProcess:
    return LineProcess([sys.executable, "-ISc", PROGRAM], {"MARK": "."})


def test_a_line_process_answers_whole_lines_until_its_end(process: LineProcess) -> None:
    assert process.answer(b"abc\n", 30.0) == b"cba" + b"." * 70000 + b"\n"
    assert not process.ended and process.end() == -9 and process.ended


def test_silence_is_no_answer_and_an_exit_is_noticed(process: LineProcess) -> None:
    assert process.answer(b"hush\n", 0.01) is None and not process.ended
    assert process.answer(b"end\n", 30.0) is None and process.ended
    assert process.end() == 3


def test_a_missing_program_fails_at_once() -> None:
    with pytest.raises(FileNotFoundError):
        LineProcess(["/no/such/program"])
