"""Runs one rollout to its typed outcome: attempts one after the other, until one comes to an outcome (law 6)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
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
    """A rollout with its score, and the earlier attempts that the infrastructure broke.

    `score` is None when the rollout leaves its group; its reward is None when the world left it to a second pass. Every
    attempt is kept, so every sampled token has an owner. `transcripts` are the conversations of its roles in
    messages, one for each branch.
    """

    rollout: Rollout
    score: Score | None
    broken: tuple[Rollout, ...] = ()
    transcripts: Mapping[str, tuple[Transcript, ...]] = field(default_factory=dict)


class RolloutRunner(Player):
    """Runner of single rollouts: plays attempts until one comes to an outcome.

    Attributes:
        breakers: breakers of the environments.
        places: places of the rollouts that a scheduler has in flight.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._successes: defaultdict[str, Successes] = defaultdict(Successes)  # by environment
        places: Mapping[str, int] = self.factory.places if isinstance(self.factory, Domains) else {}
        self._places = {name: asyncio.Semaphore(number) for name, number in places.items()}
        self.places = Places(self.config.max_concurrent_rollouts)
        self.breakers = Breakers(self.config.outage_s, self.report)

    async def run(
        self,
        task: Task,
        *,
        rollout_id: str,
        index: int,
        seed: int,
        purpose: Purpose = "train",
        priority: int = 0,
        admission: int = 0,
    ) -> Finished:
        """Run a task to an outcome.

        An attempt that the infrastructure broke is rebuilt: its journal is played again on a fresh world, and it goes
        on where it broke. Where the world or the harness does something else than before, or the world says that it
        cannot be rebuilt, the rollout starts over with the same seed. A failure of the world is the policy's only if
        the same call breaks again in three rebuilt worlds while other rollouts' calls are answered (law 6; see
        `rollout/blame.py`).

        Args:
            task: its limits may be replaced by `[rollout]`.
            rollout_id: unique in the run; see `Attempts` for the ids of attempts. The others are those of
                `RolloutRequest`.

        Raises:
            CancelledError: the awaiting task was cancelled; world, box and sessions are closed.
            Outage: the environment's infrastructure stays down; see `Breaker`.
        """
        request = RolloutRequest(
            task=self._limited(task), index=index, seed=seed, purpose=purpose, priority=priority, admission=admission
        )
        attempts = Attempts(rollout_id, self.config.retries, WorldCalls(self._successes[task.env]), self.log)
        attempts.resume(request.rollout)
        try:
            return await self._finished(rollout_id, request, attempts)
        finally:
            self._metrics.add("rollout/rebuilt", attempts.rebuilt, "sum")
            self._metrics.add("rollout/started_over", len(attempts.started_over), "sum")

    async def attempt(self, task: Task, *, rollout_id: str, index: int, seed: int) -> Attempt:
        """Run a task once. The arguments are those of `run`.

        Raises:
            BadInput: the harness asks for a role that the world does not name.
        """
        request = RolloutRequest(task=self._limited(task), index=index, seed=seed)
        return await self.play(request, self.log.new(rollout_id), 0, WorldCalls(self._successes[task.env]))

    def metrics(self) -> dict[str, float]:
        """Return the attempts since the last call that were rebuilt, and those that started over."""
        return self._metrics.take()

    async def _finished(self, rollout_id: str, request: RolloutRequest, attempts: Attempts) -> Finished:
        """Play attempts until one comes to an outcome, or no other one may be made."""
        task, again = request.task, True
        breaker = self.breakers.of(task.env)
        while again:
            if attempts.failures:
                await asyncio.sleep(retry_pause_s(self.config.retry_delay_s, attempts.idle + 1, rollout_id))
            async with self._place_of(task), breaker.trial(task.id) as trial:
                attempts.calls.answered = trial.answered
                attempt = await self.play(request, attempts.journal, attempts.number, attempts.calls)
                trial.error = None if isinstance(attempt.error, NotRebuildable) else attempt.error
                trial.broken = attempt.broken_call
            if isinstance(attempt.error, WorkerLost):
                self._metrics.add("rollout/workers_lost", 1, "sum")
            final = self._outcome_of(attempt, attempts)
            if final is not None:
                return final
            again = attempts.failed(attempt, excused=trial.is_excused)
            again = again and not isinstance(attempt.error, (RequestRefused, TaskError))
            journal = attempts.journal
            if journal.attempt != attempt.rollout.id:
                self.report(f"{rollout_id} starts over as {journal.attempt}: {attempts.started_over[-1]}")
                self.log.start_over(rollout_id, journal, attempts.started_over[-1])
        last, broken = attempts.given_up()
        return Finished(rollout=last, score=None, broken=broken)

    def _outcome_of(self, attempt: Attempt, attempts: Attempts) -> Finished | None:
        """Return the rollout if an attempt came to an outcome: its own, one that its judge failed to score, or a
        failure of the policy. Return None if the infrastructure broke it."""
        rollout, score = attempt.rollout, attempt.score
        if attempt.error is not None and not attempt.unjudged:
            if not attempts.is_the_policys(attempt):
                return None
            rollout = ended_as(rollout, replace(broken_by(attempt.error), kind="policy_failed"))
            score = Score(reward=self.config.policy_failure_reward, success=False)
        broken = attempts.finished(attempt)
        return Finished(rollout=rollout, score=score, broken=broken, transcripts=attempt.transcripts)

    def _place_of(self, task: Task) -> AbstractAsyncContextManager[None]:
        """Return what holds one of the places of a task's environment."""
        return self._places.get(task.env) or nullcontext()

    def _limited(self, task: Task) -> Task:
        """Return the task with the limits of the run."""
        limits = self.config.limits(task.limits)
        return task if limits == task.limits else replace(task, limits=limits)
