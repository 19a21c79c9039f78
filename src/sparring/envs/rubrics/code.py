"""A part that runs the answer, a Python program, against the row's tests, in boxes that the answer has not been in.

What the program does to itself (a wrong output, an exception, a limit of its box) fails the test. What the box does is
a `SandboxError`.

A test of assert statements runs in a process and a box of its own. There the program's functions are stand-ins, which
send a call to the program's process and get plain data back (`sandbox/stand_ins.py`): nothing of the answer's runs
beside its judge. A row with `shared = true` has both in one process, where the program can forge the verdict.
"""

from __future__ import annotations

import ast
import builtins
import secrets
from collections.abc import Mapping
from typing import Any

from sparring.envs.rubrics.config import Code
from sparring.envs.rubrics.text import last_match
from sparring.errors import refusal
from sparring.protocols import Sandbox
from sparring.types import ExecResult, Task

FENCED = r"(?s)```(?:python|py)?[ \t]*\n(.*?)```"

CASE = """
import io, sys
sys.stdin = io.TextIOWrapper(io.BytesIO({stdin!r}), encoding="utf-8")
exec(compile({program!r}, "answer.py", "exec"), {{"__name__": "__main__"}})
"""

BORROW = "from sparring.sandbox.stand_ins import borrow\nborrow({test!r})"
LEND = "from sparring.sandbox.stand_ins import lend\nlend({program!r})"
PASSED = "passed\n"
"""Output of `borrow` for a test that ran to its end."""

SHARED = """
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
    """Runs the tests one after another, each in boxes of its own, so that none finds what another has left."""

    def __init__(self, config: Code) -> None:
        self._config = config

    def check(self, task: Task) -> None:
        """Refuse a row without tests, with a test that does not depend on the answer, or with an output that the box
        would cut.

        Raises:
            BadInput: it has not.
        """
        column, value = self._config.column, task.data.get(self._config.column)
        if not _tests(value):
            got = repr(value)[:80]
            raise refusal(f"column {column}", "a list of {stdin, stdout}, or assert statements", got, "correct the row")
        if not isinstance(task.data.get("shared", False), bool):
            got = repr(task.data["shared"])[:80]
            do = "rename the column, or say whether tests and answer share a process"
            raise refusal("column shared", "true or false", got, do)
        for test in _tests(value):
            if isinstance(test, str):
                _check_asserts(test, f"column {column}", _shared(task))
            elif task.box is not None and (size := len(test["stdout"].encode())) > task.box.output_bytes:
                raise refusal(
                    "env.box.output_bytes", f"at least {size}, a test's output", str(task.box.output_bytes), "raise it"
                )

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> float:
        """Return the share of tests that pass, or 1 only where all do. Nothing runs in `box` itself: it stands for its
        pool.

        Raises:
            SandboxError: a box failed.
        """
        if box is None:
            raise LookupError("tests need a box: an Env with a Code part sets needs_box")
        program, tests, passed = self._program(completion), _tests(task.data[self._config.column]), 0
        for test in tests:
            good = not await _failure(program, test, _shared(task), box)
            if not good and not self._config.partial:
                return 0.0
            passed += good
        return passed / len(tests)

    async def prove(self, task: Task, box: Sandbox) -> bool:
        """Refuse a row whose own right program fails its tests. Return False if the row has none.

        Raises:
            BadInput: it fails one.
            SandboxError: a box failed.
        """
        column = self._config.reference
        reference = task.data.get(column) if column else None
        if not isinstance(reference, str) or not reference.strip():
            return False
        program = self._program(reference)
        for number, test in enumerate(_tests(task.data[self._config.column]), 1):
            if why := await _failure(program, test, _shared(task), box):
                do = "correct the row, name the column of its right program (reference), or set reference to none"
                if isinstance(test, str) and not _shared(task):
                    do += "; tests that need more of the program than plain data need shared = true in the row"
                raise refusal(f"column {column}", "a program that passes the row's tests", f"test {number}: {why}", do)
        return True

    def _program(self, completion: str) -> str:
        program = last_match(self._config.find or FENCED, completion)
        return completion if program is None else program


def _tests(value: Any) -> list[Any]:
    """Return the tests of a row; none where it is nothing of the kind."""
    tests = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    return tests if all(map(_is_test, tests)) else []


def _is_test(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return (
        isinstance(value, Mapping) and isinstance(value.get("stdout"), str) and isinstance(value.get("stdin", ""), str)
    )


def _shared(task: Task) -> bool:
    """Return True if the row's tests run in the process of the answer."""
    return bool(task.data.get("shared", False))


def _check_asserts(test: str, where: str, shared: bool) -> None:
    """Refuse a test that is not Python, or uses no name that only the answer defines: a test of builtins would pass
    without an answer.

    Raises:
        BadInput: it is not, or does not.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise refusal(where, "Python", f"{error} in {test[:80]!r}", "correct the row") from error
    loaded, own = set(), set(vars(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
    if not shared and loaded <= own:
        expected = "a test that calls a function of the answer, whose names are never those of Python's builtins"
        raise refusal(where, expected, repr(test)[:80], "call one, rename it, or set shared = true in the row")


async def _failure(program: str, test: str | Mapping[str, str], shared: bool, box: Sandbox) -> str:
    """Return one line that says why the program fails the test; empty if it passes."""
    if isinstance(test, str) and not shared:
        done = await box.converse(BORROW.format(test=test), LEND.format(program=program))
        return "" if done.exit_code == 0 and done.stdout == PASSED else _last_words(done)
    fresh = await box.fresh()
    try:
        if isinstance(test, str):
            return await _shared_failure(program, test, fresh)
        stdin = test.get("stdin", "").encode("utf-8", "surrogatepass")
        done = await fresh.python(CASE.format(stdin=stdin, program=program))
    finally:
        await fresh.close()
    sound = done.exit_code == 0 and not (done.timed_out or done.out_of_memory or done.truncated)
    if sound and _lines(done.stdout) == _lines(test["stdout"]):
        return ""
    return f"it printed {done.stdout[:80]!r}" if sound else _last_words(done)


async def _shared_failure(program: str, test: str, box: Sandbox) -> str:
    """Run a test in the process of the answer, and return one line that says why it fails; empty if it passes.

    A program can end with status 0 at any time, so a secret is printed after the assertions. A program can still search
    the interpreter's frames for it, and there are shorter ways to cheat."""
    passed = secrets.token_hex(16)
    done = await box.python(SHARED.format(program=program, test=test, passed=passed.encode()))
    return "" if done.stderr.endswith(passed) else _last_words(done)


def _last_words(done: ExecResult) -> str:
    """Return the reason for which a command failed."""
    for flag, words in (
        ("timed_out", "timed out"),
        ("out_of_memory", "out of memory"),
        ("truncated", "too much output"),
    ):
        if getattr(done, flag):
            return words
    lines = done.stderr.strip().splitlines()
    return lines[-1].strip()[:200] if lines else f"it ended with status {done.exit_code}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
