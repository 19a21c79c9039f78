"""Texts are checked in processes of their own, with a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sparring.envs.rubrics.config import Part
from sparring.envs.rubrics.workers import Workers
from sparring.errors import JudgeError


def part(**given: Any) -> Any:
    return msgspec.convert(given, Part)


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(1)


def test_mathematics_as_math_verify_sees_it(workers: Workers) -> None:
    mathematics = part(kind="math", time_limit_s=30.0)
    asked = [
        ("So it is $\\frac{1}{2}$.", "0.5", 1),
        ("first 7, then 8", "8", 1),
        ("\\boxed{-5}", "5", 0),
        ("70,000", "70000", 1),
    ]

    async def values() -> list[float]:
        return [await workers.worth(mathematics, text, [right]) for text, right, _ in asked]

    assert asyncio.run(values()) == [value for _, _, value in asked]


@pytest.mark.slow
def test_an_answer_that_would_fill_time_or_memory_is_worth_nothing(workers: Workers) -> None:
    mathematics = part(kind="math", time_limit_s=1.0)
    asked = ["$9^{9^{9^{9}}}$", "$10^{10^{10}}$", "$(1+x)^{10^{9}}$", "$\\sum_{i=1}^{10^{12}} \\sin(i)$", "5"]

    async def values() -> list[float]:
        return [await workers.worth(mathematics, text, ["5"]) for text in asked]

    assert asyncio.run(values()) == [0, 0, 0, 0, 1]


def test_an_expression_that_never_ends_is_stopped_and_the_process_goes_on(workers: Workers) -> None:
    endless = part(kind="regex", pattern="(a+)+b", time_limit_s=0.05)

    async def values() -> list[float]:
        return [await workers.worth(endless, text, None) for text in ("a" * 40 + "c", "aab")]

    assert asyncio.run(values()) == [0, 1]


def test_an_unreadable_target_is_the_judges_failure(workers: Workers) -> None:
    with pytest.raises(JudgeError, match="an answer that math-verify can read"):
        asyncio.run(workers.worth(part(kind="math"), "5", ["$ $"]))


def test_a_process_that_does_not_answer_is_the_judges_failure() -> None:
    """The wall clock only ever says that the process hangs: here the limit of processor time is far away."""
    endless = part(kind="regex", pattern="(a+)+b", time_limit_s=0.01 + 0.29)
    hasty = Workers(1, wall_s=-0.29)
    with pytest.raises(JudgeError, match="no answer after 0.01 s"):
        asyncio.run(hasty.worth(endless, "a" * 60 + "c", None))
