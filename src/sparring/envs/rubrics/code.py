"""Part `code`: runs the answer, a Python program, against the row's tests in boxes that the answer has not touched.

A wrong output, an exception or a limit of the box fails the test. A failure of the box itself is a `SandboxError`.

A test of assert statements runs in a process and a box of its own. There the program's functions are stand-ins, which
send each call to the program's process and get plain data back (`sandbox/inner/stand_ins.py`), so no code of the answer
runs in the test's process. With `shared = true` in the row both run in one process, where the program can forge the
verdict.

Tests that judge nothing would pass any answer, so a row's tests together must fail for a program that does nothing and
for one that raises (`static_analysis`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sparring.envs.rubrics.config import Code
from sparring.envs.rubrics.static_analysis import NOTHING, RAISES, ReadTest, idle_program
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

BORROW = "from sparring.sandbox.inner.stand_ins import borrow\nborrow({test!r}, {defined!r})"
LEND = "from sparring.sandbox.inner.stand_ins import lend\nlend({program!r})"
JUDGE_NOTHING = "correct the row: a comparison alone, assert (x, 'message') and what never runs judge nothing"
PASSED = "passed\n"
"""Output of `borrow` after a test that ran to its end."""

SHARED = """
import os, sys
from sparring.sandbox.inner.stand_ins import run_tests
def run():
    said = sys.stdout
    with open(os.devnull, "w") as sys.stdout:
        scope = {{"__name__": "__main__"}}
        exec(compile({program!r}, "answer.py", "exec"), scope)
        run_tests({test!r}, scope, {defined!r})
    sys.stdout = said
run()
os.write(2, {passed!r})
os._exit(0)
"""


class ProgramTests:
    """Runner of a row's tests, one after another, each in fresh boxes. Implements `Check`."""

    def __init__(self, config: Code) -> None:
        self._config = config

    def check(self, task: Task) -> None:
        """Refuse a row without tests, with a test that does not depend on the answer, or with an expected output that
        the box would truncate (`BadInput`)."""
        column, value = self._config.column, task.data.get(self._config.column)
        if not _tests(value):
            actual = repr(value)[:80]
            raise refusal(
                f"column {column}", "a list of {stdin, stdout}, or assert statements", actual, "correct the row"
            )
        if not isinstance(task.data.get("shared", False), bool):
            actual = repr(task.data["shared"])[:80]
            remedy = "rename the column, or say whether tests and answer share a process"
            raise refusal("column shared", "true or false", actual, remedy)
        if all(isinstance(test, Mapping) and not _lines(test["stdout"]) for test in _tests(value)):
            actual, remedy = "empty outputs alone", "correct the row: a program that does nothing passes"
            raise refusal(f"column {column}", "a test with an output to print", actual, remedy)
        texts = [ReadTest(test, f"column {column}") for test in _tests(value) if isinstance(test, str)]
        if len(texts) == len(_tests(value)) and not any(text.can_fail for text in texts):
            expected = "a test that asserts what the answer returns"
            raise refusal(f"column {column}", expected, repr(_tests(value)[0])[:80], JUDGE_NOTHING)
        for test in _tests(value):
            if isinstance(test, str):
                _check_asserts(test, f"column {column}", _shares_process(task))
            elif task.box is not None and (size := len(test["stdout"].encode())) > task.box.output_bytes:
                raise refusal(
                    "env.box.output_bytes", f"at least {size}, a test's output", str(task.box.output_bytes), "raise it"
                )

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> float:
        """Return the share of passed tests with `partial`; without it, 1 if all tests pass and 0 otherwise. The tests
        run in fresh boxes, not in `box`."""
        if box is None:
            raise LookupError("tests need a box: an Env with a Code part sets needs_box")
        program, tests, passed = self._program(completion), _tests(task.data[self._config.column]), 0
        for test in tests:
            good = not await _failure(program, test, _shares_process(task), box)
            if not good and not self._config.partial:
                return 0.0
            passed += good
        return passed / len(tests)

    async def prove(self, task: Task, box: Sandbox) -> bool:
        """Refuse a row if its tests pass for a program that does nothing or raises, or fail for its own right program
        (`BadInput`). Return False if the row has no such program."""
        await self._check_judges(task, box)
        if not self.has_reference(task):
            return False
        column = self._config.reference
        program = self._program(task.data[column])
        for number, test in enumerate(_tests(task.data[self._config.column]), 1):
            if why := await _failure(program, test, _shares_process(task), box):
                remedy = "correct the row, name the column of its right program (reference), or set reference to none"
                if isinstance(test, str) and not _shares_process(task):
                    remedy += "; tests that need more of the program than plain data need shared = true in the row"
                raise refusal(
                    f"column {column}", "a program that passes the row's tests", f"test {number}: {why}", remedy
                )
        return True

    def has_reference(self, task: Task) -> bool:
        """Return True if the row has a right program."""
        reference = task.data.get(self._config.reference) if self._config.reference else None
        return isinstance(reference, str) and bool(reference.strip())

    async def _check_judges(self, task: Task, box: Sandbox) -> None:
        """Refuse tests that judge nothing, or import modules that boxes lack."""
        where, tests = f"column {self._config.column}", _tests(task.data[self._config.column])
        read = {test: ReadTest(test, where) for test in tests if isinstance(test, str)}
        foreign = [test for test, text in read.items() if text.is_foreign]
        surely = [text for text in read.values() if text.surely_judges]
        if not foreign and (surely or any(isinstance(test, Mapping) and _lines(test["stdout"]) for test in tests)):
            return  # a program without output fails a test that expects one
        for does, body in (("whose functions return nothing", NOTHING), ("whose functions raise an error", RAISES)):
            program = idle_program([*read.values()], body)
            for test in [*foreign, *tests]:
                if why := await _failure(program, test, _shares_process(task), box):
                    break
            else:
                actual = f"{tests[0]!r:.80}, which pass"
                raise refusal(where, f"tests that a program fails {does}", actual, JUDGE_NOTHING)
            if why.startswith("ModuleNotFoundError"):
                raise refusal(where, "a test of what boxes have", why, "import modules of Python's library alone")

    def _program(self, completion: str) -> str:
        program = last_match(self._config.find or FENCED, completion)
        return completion if program is None else program


async def passes(program: str, tests: str, box: Sandbox) -> bool:
    """Return whether assert statements hold of a program's functions. The tests run in a process and a box of their
    own, which the program does not enter. If `box` is a verifier, only the program's box has the files copied into it.

    Args:
        tests: assert statements and test functions, which call the program's functions by name.
        box: box from whose spec the two boxes are made; nothing runs in `box` itself.

    Raises:
        BadInput: the tests are not Python, or call no function of the program.
        SandboxError: a box failed.
    """
    _check_asserts(tests, "tests", False)
    return not await _failure(program, tests, False, box)


def _tests(value: Any) -> list[Any]:
    tests = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    return tests if all(map(_is_test, tests)) else []


def _is_test(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return (
        isinstance(value, Mapping) and isinstance(value.get("stdout"), str) and isinstance(value.get("stdin", ""), str)
    )


def _shares_process(task: Task) -> bool:
    return bool(task.data.get("shared", False))


def _check_asserts(test: str, where: str, shared: bool) -> None:
    """Refuse a test that is not Python, or calls no function of the answer: a test of builtins alone would pass any
    answer."""
    if not ReadTest(test, where).answer_names and not shared:
        expected = "a test that calls a function of the answer, whose names are never those of Python's builtins"
        raise refusal(where, expected, repr(test)[:80], "call one, rename it, or set shared = true in the row")


async def _failure(program: str, test: str | Mapping[str, str], shared: bool, box: Sandbox) -> str:
    """Return a line that says why the program fails the test; "" if it passes."""
    if isinstance(test, str) and not shared:
        borrow = BORROW.format(test=test, defined=ReadTest(test, "a test").defined)
        result = await box.converse(borrow, LEND.format(program=program))
        return "" if result.exit_code == 0 and result.stdout == PASSED else _last_words(result)
    fresh = await box.fresh()
    try:
        if isinstance(test, str):
            return await _shared_failure(program, test, fresh)
        stdin = test.get("stdin", "").encode("utf-8", "surrogatepass")
        result = await fresh.python(CASE.format(stdin=stdin, program=program))
    finally:
        await fresh.close()
    sound = result.exit_code == 0 and not (result.timed_out or result.out_of_memory or result.truncated)
    if sound and _lines(result.stdout) == _lines(test["stdout"]):
        return ""
    return f"it printed {result.stdout[:80]!r}" if sound else _last_words(result)


async def _shared_failure(program: str, test: str, box: Sandbox) -> str:
    """Run a test in the answer's process; return a line that says why it fails, or "" if it passes.

    A program can exit with status 0 at any time, so success is a secret printed after the assertions. A program can
    still find it in the interpreter's frames, and there are shorter ways to cheat."""
    passed, defined = secrets.token_hex(16), ReadTest(test, "a test").defined
    result = await box.python(SHARED.format(program=program, test=test, passed=passed.encode(), defined=defined))
    return "" if result.stderr.endswith(passed) else _last_words(result)


def _last_words(result: ExecResult) -> str:
    for flag, words in (
        ("timed_out", "timed out"),
        ("out_of_memory", "out of memory"),
        ("truncated", "too much output"),
    ):
        if getattr(result, flag):
            return words
    lines = result.stderr.strip().splitlines()
    return lines[-1].strip()[:200] if lines else f"it ended with status {result.exit_code}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
