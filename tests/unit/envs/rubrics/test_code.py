"""Programs against their tests, in a real box."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sparring.envs.rubrics.code import ProgramTests
from sparring.envs.rubrics.config import Code
from sparring.errors import BadInput, SandboxError
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec, Task

CASES = [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "-1 1", "stdout": "0"}]
SUM = "a, b = map(int, input().split())\nprint(a + b)"
ASSERTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]
BOX = BoxSpec(timeout_s=0.5, memory_bytes=128 << 20)


def task(tests: Any) -> Task:
    return Task(id="t", env="e", messages=(), data={"tests": tests}, box=BOX)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def boxes(runner: asyncio.Runner) -> Iterator[BubblewrapBoxes]:
    async def made() -> BubblewrapBoxes:
        return BubblewrapBoxes(SandboxConfig(servers=1))

    boxes = runner.run(made())
    yield boxes
    runner.run(boxes.close())


async def worth(boxes: BubblewrapBoxes, completion: str, tests: Any, **part: Any) -> float:
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
    assert runner.run(worth(boxes, completion, tests)) == all_of_it
    assert runner.run(worth(boxes, completion, tests, partial=True)) == share


def test_a_broken_box_is_no_reward(runner: asyncio.Runner, boxes: BubblewrapBoxes) -> None:
    async def scored() -> float:
        box = await boxes.take(BOX)
        await box.close()
        return await ProgramTests(Code()).value(SUM, task(CASES), box)

    with pytest.raises(SandboxError):
        runner.run(scored())


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "column tests: expected a list of"),
        ([], "column tests: expected a list of"),
        ([{"stdin": "1"}], "column tests: expected a list of"),
        ([" "], "column tests: expected a list of"),
        ([{"stdout": "x" * 5000}], "env.box.output_bytes: expected at least 5000, a test's output, got 4096"),
    ],
)
def test_rows_without_usable_tests_are_refused(tests: Any, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        ProgramTests(Code()).check(task(tests))
    assert said in str(refused.value)
