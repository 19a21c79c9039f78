"""Second scoring pass over whole groups. Each scorer has a time limit, its scores are checked, and it is retried if it
fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sparring.backoff import retry_pause_s
from sparring.envs.answers import rated
from sparring.envs.executor import EXECUTOR, Executor, InlineExecutor, is_cooperative
from sparring.errors import JudgeError, boundary
from sparring.protocols import Scorer
from sparring.rollout.runner import RolloutRunner
from sparring.types import Rollout, Score, Task


class GroupScoring:
    """Scorers of a run, in order.

    Args:
        scorers: scorers; each gets the scores of the scorer before it.
        runner: runner of the rollouts. Its config gives the time limit of a scorer, `timeouts.score_s`, and the number
            of `retries.rebuilds`.
    """

    def __init__(self, scorers: Sequence[Scorer], runner: RolloutRunner) -> None:
        self._scorers = scorers
        self._runner = runner

    async def scores(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scores of a group after all scorers.

        Raises:
            JudgeError: a scorer raised, was too slow, or did not return one score per rollout.
            InfraError: infrastructure failure that the scorer itself reported.
            BadInput: a scorer refused the group.
        """
        for scorer in self._scorers:
            scores = await self._score_with_retries(scorer, task, rollouts, scores)
        return scores

    async def _score_with_retries(
        self, scorer: Scorer, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> Sequence[Score]:
        config = self._runner.config
        for retry in range(config.retries.rebuilds + 1):
            if retry:
                await asyncio.sleep(retry_pause_s(config.retries.delay_s, retry, "scorer", rollouts[0].id))
            try:
                return await self._score_once(scorer, task, rollouts, scores)
            except JudgeError:
                if retry == config.retries.rebuilds:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _score_once(
        self, scorer: Scorer, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> Sequence[Score]:
        where, executor = f"scorer {type(scorer).__name__}", self._runner.executors()
        try:
            with self._runner.phases(rollouts[0].id).within("score", where), boundary(JudgeError, where):
                if is_cooperative(scorer.score):
                    work = InlineExecutor().run(_call_scorer, executor, scorer, task, rollouts, scores)
                else:
                    work = executor.run(scorer.score, task, rollouts, scores)
                return _check_scores(await work, rollouts)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise JudgeError(f"{where}: CancelledError: its own code was cancelled") from None
        finally:
            executor.close()


async def _call_scorer(
    executor: Executor, scorer: Scorer, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]
) -> Sequence[Score]:
    """Call a scorer that runs blocking code in an executor itself. Must run in a task of its own."""
    EXECUTOR.set(executor)
    return await scorer.score(task, rollouts, scores)


def _check_scores(answer: object, rollouts: Sequence[Rollout]) -> Sequence[Score]:
    if not isinstance(answer, Sequence) or isinstance(answer, (str, bytes)):
        raise TypeError(f"expected a list of scores, got {answer!r:.80}")
    if len(answer) != len(rollouts):
        raise ValueError(f"expected {len(rollouts)} scores, one of each rollout, got {len(answer)}")
    scores = []
    for place, (score, rollout) in enumerate(zip(answer, rollouts, strict=True)):
        checked = rated(score, [trajectory.role for trajectory in rollout.trajectories], rollout.trajectories)
        if checked is None:
            raise TypeError(f"expected a Score at place {place}, got None")
        scores.append(checked)
    return scores
