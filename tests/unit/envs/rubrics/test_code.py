"""Programs against their tests, in a real box."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparring.envs.rubrics.code import ProgramTests
from sparring.envs.rubrics.config import Code
from sparring.errors import BadInput, SandboxError
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.types import BoxSpec, Task

CASES = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "-1 1", "stdout": "0"}]
SUM = "a, b = map(int, input().split())\nprint(a + b)"
ASSERTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]
BOX = BoxSpec(timeout_s=0.5, memory_bytes=128 << 20)


def task(tests: Any) -> Task:
    return Task(id="t", env="e", messages=(), data={"tests": tests}, box=BOX)


async def reward_of(boxes: BubblewrapBoxes, completion: str, tests: Any, **part: Any) -> float:
    box = await boxes.take(BOX)
    try:
        return await ProgramTests(Code(**part)).value(completion, task(tests), box)
    finally:
        await box.close()


@pytest.mark.parametrize(
    ("completion", "tests", "all_of_it", "share"),
    [
        (SUM, CASES, 1, 1),
        (f"First:\n```python\nprint(1)\n```\nBetter:\n```py\n{SUM}\n```", CASES, 1, 1),
        ("input(); print('5')", CASES, 0, 0.5),
        (f"{SUM}\nraise SystemExit(1)", CASES, 0, 0),
        (f"{SUM}\nwhile True: pass", CASES[:1], 0, 0),
        (f"{SUM}\nx = bytearray(1 << 29)", CASES, 0, 0),
        (f"{SUM}\nprint('x' * 100_000)", CASES, 0, 0),
        ("", CASES, 0, 0),
        ("def double(x): return 2 * x", ASSERTS, 1, 1),
        ("def double(x): return 4", ASSERTS, 0, 0.5),
        ("def double(x): return 2 * x\nprint('x' * 100_000)", ASSERTS, 1, 1),
        ("import sys\nsys.exit(0)", ASSERTS, 0, 0),
        ("import os\nos._exit(0)", ASSERTS, 0, 0),
        ("def double(x): return 2 * x", "\n".join(ASSERTS), 1, 1),
    ],
)
def test_programs(
    runner: asyncio.Runner, boxes: BubblewrapBoxes, completion: str, tests: Any, all_of_it: float, share: float
) -> None:
    """What the program does to itself, its limits included, is its failure."""
    assert runner.run(reward_of(boxes, completion, tests)) == all_of_it
    assert runner.run(reward_of(boxes, completion, tests, partial=True)) == share


def test_a_broken_box_is_no_reward(runner: asyncio.Runner, boxes: BubblewrapBoxes) -> None:
    async def scored() -> float:
        box = await boxes.take(BOX)
        await box.close()
        return await ProgramTests(Code()).value(SUM, task(CASES), box)

    with pytest.raises(SandboxError):
        runner.run(scored())


EXACT = """
import math
VALUES = [None, True, 1, 1.0, -0.0, 1e300, 5e-324, math.inf, -math.inf,
    2 ** 63, -(2 ** 63), 3 ** 8999, 1 + 2j, "", "ž🐎\\ud800", "\\ud83d\\ude00",
    b"", bytes(range(256)), [], (), {}, set(), frozenset({1}), [1, [2, (3, {4})]], {1: "a", "1": "b", (1, 2): None, None: [True]},
    {1, "a", (1,), frozenset({2})}, "int", ["int", "0x1"], list(range(9999)), [[[[[[]]]]]], ["dict"], ("list", 1)]
same = lambda a, b: type(a) is type(b) and repr(a) == repr(b)
for value in VALUES:
    assert same(echo(value), value) and same(echo(named=value), value), value
assert math.isnan(echo(math.nan)) and echo(3 ** 99999) == 3 ** 99999
assert CONSTANT == {"of": (1, 2)} and double(3) == 6 and gcd(4, 6) == 2
"""
ECHO = """
from math import gcd
CONSTANT = {'of': (1, 2)}
def double(x): return 2 * x
def echo(x=None, named=None): return named if x is None else x
"""
BASES = """
import collections, enum
class Level(enum.IntEnum): LOW = 1
class Text(str): pass
Point = collections.namedtuple("Point", "x y")
def made(kind):
    return {"enum": Level.LOW, "text": Text("a"), "named": Point(1, 2), "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(a=1), "default": collections.defaultdict(list, a=[1]), "bool": True}[kind]
"""
BASE_TESTS = """
same = lambda a, b: type(a) is type(b) and a == b
assert same(made("enum"), 1) and same(made("text"), "a") and same(made("named"), (1, 2)) and same(made("counter"), {"a": 2, "b": 1})
assert same(made("ordered"), {"a": 1}) and same(made("default"), {"a": [1]}) and same(made("bool"), True)
"""
RAISED = """
import unittest
class Case(unittest.TestCase):
    def runTest(self):
        for name in ("ValueError", "KeyError", "ZeroDivisionError", "UnicodeDecodeError", "OSError", "RecursionError", "Exception"):
            with self.assertRaises(__builtins__[name]) as caught: fail(name)
            self.assertIs(type(caught.exception), __builtins__[name])
        with self.assertRaises(LookupError) as caught: fail("Mine")
        self.assertIs(type(caught.exception), KeyError)
        with self.assertRaises(SystemExit): fail("SystemExit")
        with self.assertRaises(RuntimeError): fail("StopIteration")
        with self.assertRaises(TypeError): fail()
Case().runTest()
"""
FAILS = """
class Mine(KeyError): pass
def fail(name):
    if name == "ZeroDivisionError": 1 / 0
    if name == "UnicodeDecodeError": b"\\xff".decode()
    if name == "RecursionError": fail(name)
    raise Mine("x") if name == "Mine" else __builtins__[name] if name == "OSError" else getattr(__import__("builtins"), name)("x")
"""
LIVE = {
    "class Stack(list): pass\ndef made(): return Stack": "assert made() is not None",
    "def made(): return (n for n in range(3))": "assert list(made()) == [0, 1, 2]",
    "async def made(): return 1": "import asyncio\nassert asyncio.run(made()) == 1",
    "def made():\n    a = []\n    a.append(a)\n    return a": "assert made()",
    "def made(): return 'x' * (1 << 23)": "assert len(made()) == 1 << 23",
    "def made(): return object()": "try: value = made()\nexcept BaseException: value = None\nassert value is not None",
    "def made(f): return f(1)": "assert made(lambda x: x) == 1",
    "def made(a): a.append(1)": "a = []\nmade(a)\nassert a == [1]",
    "class made:\n    def __init__(self, n): self.n = n": "assert made(3).n == 3",
    "def made(): print('said')": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s: made()\nassert s.getvalue() == 'said\\n'"
    ),
}


@pytest.mark.parametrize(
    ("program", "test"), [(ECHO, EXACT), (BASES, BASE_TESTS), (FAILS, RAISED)], ids=["exact", "bases", "raised"]
)
def test_plain_data_crosses_unchanged(runner: asyncio.Runner, boxes: BubblewrapBoxes, program: str, test: str) -> None:
    assert runner.run(failure(boxes, program, test)) == ""


@pytest.mark.parametrize("program", LIVE)
def test_live_objects_do_not_cross_unless_the_row_says_so(
    runner: asyncio.Runner, boxes: BubblewrapBoxes, program: str
) -> None:
    """Nor can a test catch it and go on. With `shared = true` tests and program share a process."""
    assert runner.run(failure(boxes, program, LIVE[program])) != ""
    assert runner.run(failure(boxes, program, LIVE[program], shared=True)) == ""


async def failure(boxes: BubblewrapBoxes, program: str, tests: Any, shared: bool = False) -> str:
    """What the preflight says of a row whose right answer is `program`."""
    data = {"tests": tests, "answer": program} | ({"shared": True} if shared else {})
    box = await boxes.take(BOX)
    try:
        rubric = ProgramTests(Code())
        row = Task(id="t", env="e", messages=(), data=data, box=BOX)
        rubric.check(row)
        assert await rubric.prove(row, box)
        return ""
    except BadInput as error:
        return str(error)
    finally:
        await box.close()


@pytest.mark.parametrize(
    ("program", "tests", "said"),
    [
        ("def double(x): return x", ASSERTS, "column answer: expected a program"),
        ("def double(x): return iter([x])", ASSERTS, "test 1: line 1: the result of double cannot cross"),
        (
            "def double(x): return x",
            "double(print)",
            "line 1: an argument of double cannot cross: a value of type builtin_function",
        ),
        ("def twice(x): return x", ASSERTS, "test 1: NameError"),
        ("double =", ASSERTS, "test 1: the program did not run to its end"),
        ("while True: pass", ASSERTS, "test 1: the program did not run to its end"),
        ("print(5)", CASES, "test 2: it printed"),
        ("print(int(input()))", CASES, "test 1: ValueError"),
    ],
)
def test_a_right_answer_that_fails_is_refused_with_the_reason(
    runner: asyncio.Runner, boxes: BubblewrapBoxes, program: str, tests: Any, said: str
) -> None:
    async def proven(program: str, reference: str = "answer") -> bool:
        box = await boxes.take(BOX)
        row = Task(id="t", env="e", messages=(), data={"tests": tests, "answer": program}, box=BOX)
        return await ProgramTests(Code(reference=reference)).prove(row, box)

    with pytest.raises(BadInput) as refused:
        runner.run(proven(program))
    assert said in str(refused.value)
    assert (
        not runner.run(proven(program, ""))
        and not runner.run(proven(program, "solution"))
        and not runner.run(proven(" "))
    )


CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(double(2), 4)\n"
ANY = "import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(double(2), 4)\n"


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "tests",
    ["def test_double():\n    assert double(2) == 4", CASE, CASE + "unittest.main(argv=['x'], exit=False)", CASE + "unittest.main()",
     "class TestDouble:\n    def setup_method(self): self.x = 2\n    def test(self): assert double(self.x) == 4"],
)  # fmt: skip
def test_tests_that_pytest_and_unittest_would_find_are_run(
    runner: asyncio.Runner, boxes: BubblewrapBoxes, tests: str, shared: bool
) -> None:
    assert runner.run(failure(boxes, "def double(x): return 2 * x", tests, shared)) == ""
    assert "a program that passes the row's tests" in runner.run(
        failure(boxes, "def double(x): return 0", tests, shared)
    )


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("try: assert double(2) == 4\nexcept Exception: pass", "fails whose functions return nothing"),
        ("assert double(2) is None", "fails whose functions return nothing"),
        (ANY, "fails whose functions return nothing"),
        ("try: assert double(2)\nexcept NotImplementedError: pass", "fails whose functions raise an error"),
        ("import pytest\ndef test(): assert double(2) == 4", "a test of what boxes have"),
    ],
)
def test_tests_that_an_idle_program_passes_are_refused(
    runner: asyncio.Runner, boxes: BubblewrapBoxes, tests: str, said: str
) -> None:
    assert said in runner.run(failure(boxes, "def double(x): return 2 * x", tests))
    beside = runner.run(failure(boxes, "def double(x): return 2 * x", ["assert double(3) == 6", tests]))
    assert (said in beside) == ("pytest" in tests), "the tests of a row together have to fail"


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("double(2) == 4", "expected a test that asserts"),
        (["assert (double(2) == 4, 'message')", "if False: assert double(2)"], "expected a test that asserts"),
        ([{"stdin": "", "stdout": ""}, {"stdin": "1", "stdout": " \n"}], "expected a test with an output"),
        ("def test(x): assert double(x)", "without parameters"),
        ("assert double(2) ==", "column tests: expected Python"),
        (
            "assert pow(2, 2) == 4",
            "column tests: expected a test that calls a function of the answer, whose names are never those of",
        ),
        ("def check(candidate):\n    assert candidate(2) == 4", "expected a test that calls a function of the answer"),
        ("from math import gcd\nassert gcd(2, 4) == 2", "expected a test that calls a function of the answer"),
        (None, "column tests: expected a list of"),
        ([], "column tests: expected a list of"),
        ([{"stdin": "1"}], "column tests: expected a list of"),
        ([" "], "column tests: expected a list of"),
        ([{"stdout": "x" * 5000}], "env.box.output_bytes: expected at least 5000"),
    ],
)
def test_rows_without_usable_tests_are_refused(tests: Any, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        ProgramTests(Code()).check(task(tests))
    assert said in str(refused.value)
