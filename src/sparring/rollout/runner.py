"""Runs one rollout to its typed outcome by playing attempts one after the other (law 6)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from sparring.backoff import retry_pause_s
from sparring.envs.domains import Domains
from sparring.errors import NotRebuildable, RequestRefused, TaskError, WorkerLost
from sparring.record.branches import Transcript
from sparring.rollout.attempts import Attempt, Attempts
from sparring.rollout.blame import Successes, WorldCalls
from sparring.rollout.breaker import Breakers
from sparring.rollout.load import Places
from sparring.rollout.outcomes import broken_by, ended_as
from sparring.rollout.play import Player, RolloutRequest
from sparring.types import Purpose, Rollout, Score, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Finished rollout. The broken attempts are kept, so that every sampled token has an owner.

    Attributes:
        score: score of the rollout; None if the rollout leaves its group. Its reward is None if the world leaves it to
            a second scoring pass.
        broken: earlier attempts that the infrastructure broke.
        transcripts: conversations of each role in messages, one for each branch.
    """

    rollout: Rollout
    score: Score | None
    broken: tuple[Rollout, ...] = ()
    transcripts: Mapping[str, tuple[Transcript, ...]] = field(default_factory=dict)


class RolloutRunner(Player):
    """Runner of single rollouts: plays attempts until one comes to an outcome."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._successes: defaultdict[str, Successes] = defaultdict(Successes)  # by environment
        places: Mapping[str, int] = self.factory.places if isinstance(self.factory, Domains) else {}
        self._places = {name: asyncio.Semaphore(number) for name, number in places.items()}
        self.places = Places(self.config.max_concurrent_rollouts)
        self.breakers = Breakers(self.config.retries.outage_s, self.report)

    async def run(
        self,
        task: Task,
        *,
        rollout_id: str,
        index: int,
        seed: int,
        purpose: Purpose = "train",
        admission: int = 0,
    ) -> Finished:
        """Run a task to an outcome.

        An attempt that the infrastructure broke is rebuilt: its journal is played on a fresh world, and it continues
        where it broke. If the world or the harness then differs from the journal, or the world declares that it cannot
        be rebuilt, the rollout starts over with the same seed. A failure of the world counts as the policy's only if
        the same call fails again in three rebuilt worlds while calls of other rollouts succeed (law 6; see
        `rollout/blame.py`).

        Args:
            task: task, whose limits `[rollout]` may replace.
            rollout_id: id of the rollout, unique in the run; see `Attempts` for the ids of attempts. The other
                arguments are fields of `RolloutRequest`.

        Raises:
            CancelledError: the awaiting task was cancelled; world, box and sessions are closed.
        """
        request = RolloutRequest(
            task=self._with_limits(task), index=index, seed=seed, purpose=purpose, admission=admission
        )
        calls = WorldCalls(self._successes[task.env])
        attempts = Attempts(rollout_id, request.rollout, self.config.retries.rebuilds, calls, self.log)
        self._metrics.add("rollout/started_over", 0, "sum")
        breaker, environment, again = self.breakers.of(task.env), self._places.get(task.env) or nullcontext(), True
        while again:
            if attempts.failures:
                await asyncio.sleep(retry_pause_s(self.config.retries.delay_s, attempts.idle + 1, rollout_id))
            async with environment, breaker.trial(task.id) as trial:
                calls.answered = trial.answered
                attempt = await self.play(request, attempts.journal, attempts.number, calls, attempts.prepared)
                trial.error = None if isinstance(attempt.error, NotRebuildable) else attempt.error
                trial.broken = attempt.broken_call
            self._count(attempt)
            final = self._finish(attempt, attempts)
            if final is not None:
                return final
            again = attempts.add_failure(attempt, excused=trial.is_excused)
            again = again and not isinstance(attempt.error, (RequestRefused, TaskError))
            if attempts.journal.attempt != attempt.rollout.id:
                self._metrics.add("rollout/started_over", 1, "sum")
                self.report(f"{rollout_id} starts over as {attempts.journal.attempt}: {attempts.refused}")
                self.log.start_over(rollout_id, attempts.journal, attempts.refused)
        last, broken = attempts.give_up()
        return Finished(rollout=last, score=None, broken=broken)

    async def attempt(self, task: Task, *, rollout_id: str, index: int, seed: int) -> Attempt:
        """Run a task once. The arguments are as in `run`."""
        request = RolloutRequest(task=self._with_limits(task), index=index, seed=seed)
        return await self.play(request, self.log.new(rollout_id), 0, WorldCalls(self._successes[task.env]))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of rollouts since the last call."""
        return self._metrics.take()

    def _count(self, attempt: Attempt) -> None:
        self._metrics.add("rollout/rebuilt", int(attempt.is_rebuild and attempt.caught_up), "sum")
        if attempt.is_fork:
            self._metrics.add("rollout/from_snapshot", 1, "sum")
        if isinstance(attempt.error, WorkerLost):
            self._metrics.add("rollout/workers_lost", 1, "sum")

    def _finish(self, attempt: Attempt, attempts: Attempts) -> Finished | None:
        """Return the finished rollout of an attempt; None if the infrastructure broke the attempt. A failure of the
        policy gets its fixed reward, and a rollout whose judge failed has no score."""
        rollout, score = attempt.rollout, attempt.score
        if attempt.error is not None and not attempt.unjudged:
            if not attempts.is_the_policys(attempt):
                return None
            rollout = ended_as(rollout, replace(broken_by(attempt.error), kind="policy_failed"))
            score = Score(reward=self.config.rewards.policy_failure, success=False)
        return Finished(rollout=rollout, score=score, broken=attempts.finish(), transcripts=attempt.transcripts)

    def _with_limits(self, task: Task) -> Task:
        limits = self.config.limits.apply(task.limits)
        return task if limits == task.limits else replace(task, limits=limits)
