"""A part that runs the answer, a Python program, against the row's tests in the task's box.

What the program does to itself (a wrong output, an exception, a limit of its box) fails the test. What the box does is a
`SandboxError`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sparring.envs.rubrics.config import Code
from sparring.envs.rubrics.text import found
from sparring.errors import refusal
from sparring.protocols import Sandbox
from sparring.types import Task

FENCED = r"(?s)```(?:python|py)?[ \t]*\n(.*?)```"

CASE = """
import io, sys
sys.stdin = io.TextIOWrapper(io.BytesIO({stdin!r}), encoding="utf-8")
exec(compile({program!r}, "answer.py", "exec"), {{"__name__": "__main__"}})
"""

ASSERTION = """
import os, sys
def run():
    said = sys.stdout
    with open(os.devnull, "w") as sys.stdout:
        scope = {{"__name__": "__main__"}}
        exec(compile({program!r}, "answer.py", "exec"), scope)
        exec(compile({test!r}, "test.py", "exec"), scope)
    sys.stdout = said
run()
os.write(2, {passed!r})
os._exit(0)
"""


class ProgramTests:
    """Runs the tests one after another, each as a command of its own."""

    def __init__(self, config: Code) -> None:
        self._config = config

    def check(self, task: Task) -> None:
        """The row has tests, and none whose right output the box would cut.

        Raises:
            BadInput: it has not.
        """
        column = self._config.column
        if not _tests(task.data.get(column)):
            got = repr(task.data.get(column))[:80]
            raise refusal(f"column {column}", "a list of {stdin, stdout}, or assert statements", got, "correct the row")
        if task.box is None:
            return
        for test in _tests(task.data[column]):
            size = 0 if isinstance(test, str) else len(test["stdout"].encode())
            if size > task.box.output_bytes:
                raise refusal("env.box.output_bytes", f"at least {size}, a test's output", str(task.box.output_bytes), "raise it")

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> float:
        """The share of tests that pass, or 1 only where all do.

        Raises:
            SandboxError: the box failed.
        """
        if box is None:
            raise LookupError("tests need a box: an Env with a Code part sets needs_box")
        program = found(self._config.find or FENCED, completion)
        program = completion if program is None else program
        tests, passed = _tests(task.data[self._config.column]), 0
        for test in tests:
            good = await (_asserts(program, test, box) if isinstance(test, str) else _answers(program, test, box))
            if not good and not self._config.partial:
                return 0.0
            passed += good
        return passed / len(tests)


def _tests(given: Any) -> list[Any]:
    """The tests of a row; none where it is nothing of the kind."""
    tests = [given] if isinstance(given, str) else list(given) if isinstance(given, (list, tuple)) else []
    return tests if all(map(_is_test, tests)) else []


def _is_test(given: Any) -> bool:
    if isinstance(given, str):
        return bool(given.strip())
    return isinstance(given, Mapping) and isinstance(given.get("stdout"), str) and isinstance(given.get("stdin", ""), str)


async def _answers(program: str, test: Mapping[str, str], box: Sandbox) -> bool:
    """Whether the program says what it should to an input; blanks at the ends of lines and of the whole do not count."""
    stdin = test.get("stdin", "").encode("utf-8", "surrogatepass")
    done = await box.python(CASE.format(stdin=stdin, program=program))
    sound = done.exit_code == 0 and not (done.timed_out or done.out_of_memory or done.truncated)
    return sound and _lines(done.stdout) == _lines(test["stdout"])


async def _asserts(program: str, test: str, box: Sandbox) -> bool:
    """Whether the assertions were reached and hold. A secret says so, because a program can end with status 0 at any time; one
    that searches the interpreter's frames for it could still find it."""
    passed = secrets.token_hex(16)
    done = await box.python(ASSERTION.format(program=program, test=test, passed=passed.encode()))
    return done.stderr.endswith(passed)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
