"""What the text of a test shows."""

from __future__ import annotations

import pytest

from sparring.envs.rubrics.static_analysis import NOTHING, ReadTest, idle_program
from sparring.errors import BadInput

CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)\n"


def read(text: str) -> ReadTest:
    return ReadTest(text, "row 1")


def test_uncalled_test_definitions_are_collected_like_pytest_and_unittest() -> None:
    assert read("def test_f(): assert f(1)\ndef helper(): pass\n").defined == ("test_f",)
    assert read("def test(g): assert g(1)\ntest(f)").defined == ()
    assert read(CASE + "class U(T): pass\nclass TestV:\n    def test(self): assert f(1)\n").defined == (
        "T",
        "U",
        "TestV",
    )
    for text in ("def test_f(x): assert f(x)", "class TestF:\n    def test(self, x): assert f(x)"):
        with pytest.raises(BadInput, match="row 1: expected test functions without parameters"):
            read(text)


@pytest.mark.parametrize(
    ("text", "surely", "can_fail"),
    [("assert f(1) == 2", True, True), ("assert f(1) == -2, 'no'", True, True), ("assert f(1) is None", False, True),
     ("assert f(1) == None", False, True), ("if x:\n    assert f(1) == 2", False, True), ("import numpy\nassert f(1) == 2", False, True),
     ("assert math(1) == 2", False, True), (CASE, False, True), ("f(1) == 2", False, False), ("assert (f(1) == 2, 'm')", False, False),
     ("if False:\n    assert f(1) == 2", False, False), ("while 0:\n    assert f(1)\nelse:\n    assert f(1)", False, True),
     ("assert True\nf", False, False), ("raise ValueError if f(1) else 0", False, True), ("sys.exit(f(1))", False, True)],
)  # fmt: skip
def test_static_analysis_finds_tests_that_surely_judge_or_cannot_fail(text: str, surely: bool, can_fail: bool) -> None:
    assert (read(text).surely_judges, read(text).can_fail) == (surely, can_fail)


def test_an_idle_program_defines_the_functions_of_the_tests() -> None:
    program = idle_program([read("assert f(math.pi, y=len('a'))"), read("assert Stack().size")], NOTHING)
    scope: dict[str, object] = {}
    exec(program, scope)
    assert {"f", "Stack"} == scope.keys() - {"__builtins__"} and scope["f"](1, y=2) is None  # type: ignore[operator]
