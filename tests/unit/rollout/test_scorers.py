"""Several second passes in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from sparring.rollout.scorers import InTurn
from sparring.types import Rollout, Score, Task


class Line:
    """reward -> a * reward + b."""

    def __init__(self, a: float, b: float) -> None:
        self._a, self._b = a, b

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        return [replace(score, reward=self._a * (score.reward or 0.0) + self._b) for score in scores]


def test_each_sees_what_those_before_it_made() -> None:
    task, double, more = Task(id="t", env="e", messages=()), Line(2, 0), Line(1, 3)
    for scorers, reward in (((double, more), 5), ((more, double), 8), ((None, more), 4)):
        scorer = InTurn.of(*scorers)
        assert scorer is not None
        assert asyncio.run(scorer.score(task, [], [Score(reward=1.0)]))[0].reward == reward


def test_none_of_none_and_one_is_itself() -> None:
    double = Line(2, 0)
    assert InTurn.of(None, None) is None and InTurn.of(None, double) is double
