"""Several second passes over one group."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.protocols import Scorer
from sparring.types import Rollout, Score, Task


class InTurn:
    """Implements `Scorer`: each one sees what those before it made of the scores."""

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self._scorers = tuple(scorers)

    @staticmethod
    def of(*scorers: Scorer | None) -> Scorer | None:
        """Those that are there, as one; None where there is none."""
        there = [scorer for scorer in scorers if scorer is not None]
        return InTurn(there) if len(there) > 1 else next(iter(there), None)

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """The scores after the last."""
        for scorer in self._scorers:
            scores = await scorer.score(task, rollouts, scores)
        return scores
