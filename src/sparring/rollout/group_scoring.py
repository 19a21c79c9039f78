"""Second passes over a whole group: each within a limit of time, checked, and asked again where it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sparring.envs.executor import Executor, InlineExecutor, is_cooperative
from sparring.errors import JudgeError, boundary
from sparring.protocols import Scorer
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import rated
from sparring.types import Rollout, Score, Task


class GroupScoring:
    """Scorers of one run, in their order.

    Args:
        scorers: each is handed what the one before it returned.
        config: `score_timeout_s` is the limit of each, `retries` how often one that failed is asked again.
        executors: makes the executor of a scorer's call.
    """

    def __init__(
        self, scorers: Sequence[Scorer], config: RolloutConfig, executors: Callable[..., Executor] = InlineExecutor
    ) -> None:
        self._scorers = scorers
        self._config = config
        self._executors = executors

    async def scores(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scores of a group after all passes.

        Raises:
            JudgeError: a scorer raised, gave no answer in time, or gave one that is no score of each rollout.
            InfraError: what a scorer itself says broke.
            BadInput: a scorer refuses what it is asked to score.
        """
        for scorer in self._scorers:
            scores = await self._retried(scorer, task, rollouts, scores)
        return scores

    async def _retried(
        self, scorer: Scorer, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Ask one scorer until it answers or the retries are used up."""
        for retry in range(self._config.retries + 1):
            if retry:
                await asyncio.sleep(self._config.retry_delay_s * 2 ** (retry - 1))
            try:
                return await self._asked(scorer, task, rollouts, scores)
            except JudgeError:
                if retry == self._config.retries:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _asked(
        self, scorer: Scorer, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Ask one scorer once."""
        where, limit_s = f"scorer {type(scorer).__name__}", self._config.score_timeout_s
        executor = self._executors() if not is_cooperative(scorer.score) else InlineExecutor()
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                with boundary(JudgeError, where):
                    return _checked(await executor.run(scorer.score, task, rollouts, scores), rollouts)
        except TimeoutError:
            error = JudgeError(f"{where}: no scores after {limit_s:g} s (rollout.score_timeout_s)")
            error.limit_s = limit_s
            raise error from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise JudgeError(f"{where}: CancelledError: its own code was cancelled") from None
        finally:
            executor.close()


def _checked(answer: object, rollouts: Sequence[Rollout]) -> Sequence[Score]:
    """Return a scorer's answer if it is one score of each rollout."""
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        raise TypeError(f"expected a list of scores, got {answer!r:.80}")
    if len(answer) != len(rollouts):
        raise ValueError(f"expected {len(rollouts)} scores, one of each rollout, got {len(answer)}")
    for place, (score, rollout) in enumerate(zip(answer, rollouts, strict=True)):
        if score is None:
            raise TypeError(f"expected a Score at place {place}, got None")
        rated(score, [trajectory.role for trajectory in rollout.trajectories])
    return answer
