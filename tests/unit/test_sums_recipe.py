"""recipes/sums/prepare.py: programs that compute their row's answer, and a split that no question is in two of."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "recipes/sums/prepare.py"
PREPARE = runpy.run_path(str(PROGRAM))


def row(worked: str, answer: str, question: str = "How many?") -> dict[str, str]:
    return {"question": question, "answer": f"{worked}\n#### {answer}"}


@pytest.mark.parametrize(
    ("worked", "answer", "program"),
    [
        ("He has 7 - 3 = <<7-3=4>>4.\nThat is 4 * 2 = <<4*2=8>>8.", "8", "a = 7-3\nb = a*2\nprint(b)"),
        ("<<1,200/2=600>>600 and <<600+1.5=601.5>>", "601.5", "a = 1200/2\nb = a+1.5\nprint(b)"),
        ("<<2+2=4>>, again <<1+3=4>>, both <<4*4=16>>", "16", "a = 2+2\nb = 1+3\nc = b*b\nprint(c)"),
        ("<<-(3-10)=7>>7", "7", "a = -(3-10)\nprint(a)"),
    ],
)
def test_a_program_names_earlier_results_and_computes_the_answer(worked: str, answer: str, program: str) -> None:
    messages = PREPARE["shown"](row(worked, answer))
    call = messages[2]["tool_calls"][0]["function"]
    assert (call["name"], call["arguments"]) == ("python", {"code": program})
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert printed.getvalue() == messages[3]["content"] + "\n" and messages[4]["content"] == answer


@pytest.mark.parametrize(
    ("worked", "answer"),
    [
        ("No sum is marked: 3 + 4 = 7.", "7"),
        ("<<3+4=7>>7, and 7 - 1 = 6", "6"),
        ("<<x*2=8>>", "8"),
        ("<<3+=7>>", "7"),
        ("<<8/0=1>>", "1"),
        ("<<2**3=8>>", "8"),
        ("<<abs(8)=8>>", "8"),
        ("<<1+1=2>>" * 26, "2"),
    ],
)
def test_a_row_whose_sums_do_not_compute_its_answer_is_not_shown(worked: str, answer: str) -> None:
    assert PREPARE["shown"](row(worked, answer)) is None


def prepared(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), str(source), str(folder)], capture_output=True, text=True)


def test_the_files_part_all_questions(tmp_path: Path) -> None:
    rows = [row(f"<<{n}+1={n + 1}>>", str(n + 1), f"What is {n} and 1?") for n in range(PREPARE["ROWS"])]
    source = tmp_path / "test.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert prepared(source, tmp_path / "sums").returncode == 0

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / f"sums/{name}.jsonl").read_text().splitlines()]

    held_out, short, shown = (read(name) for name in ("held-out", "short", "shown"))
    asked = {each["question"] for each in held_out}, {each["question"] for each in short}
    assert (len(held_out), len(short)) == (400, 919) and not asked[0] & asked[1]
    assert {each["messages"][1]["content"] for each in shown} == asked[1]


def test_another_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "test.jsonl"
    source.write_text(json.dumps(row("<<1+1=2>>", "2")))
    done = prepared(source, tmp_path / "sums")
    assert done.returncode != 0 and "1319 rows" in done.stderr and not (tmp_path / "sums").exists()
    assert prepared(tmp_path / "nothing", tmp_path).returncode != 0
