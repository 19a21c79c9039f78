"""Runs one rollout to its typed outcome (law 6)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from types import MappingProxyType

from sparring.backoff import retry_pause_s
from sparring.envs.domains import Domains
from sparring.errors import (
    BadInput,
    EngineError,
    InfraError,
    JudgeError,
    LimitReached,
    PolicyFailure,
    SandboxError,
    TaskError,
)
from sparring.protocols import Boxes, EnvFactory, Harness
from sparring.record.transcript import Transcript
from sparring.rollout.breaker import Breakers
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import ANSWERED, GuardedEnv, RunningEpisode, SessionRecorder, outcome_at
from sparring.rollout.lengths import sampled_tokens
from sparring.types import Failure, Outcome, Purpose, Rollout, Score, Task, Timing

TIMEOUT = Outcome(kind="truncated", reason="timeout")
MALFORMED = Outcome(kind="policy_failed", reason="malformed")
CANCELLED = Outcome(kind="cancelled", reason="cancelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A rollout with its score, and the earlier attempts that the infrastructure broke.

    `score` is None when the rollout leaves its group; its reward is None when the world left it to a second pass. Every
    attempt is kept, so every sampled token has an owner. `transcripts` are the conversations of its roles in messages.
    """

    rollout: Rollout
    score: Score | None
    broken: tuple[Rollout, ...] = ()
    transcripts: Mapping[str, Transcript] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try: what it left, in tokens and in messages, and the infrastructure's error if that ended it."""

    rollout: Rollout
    score: Score | None
    error: InfraError | None
    transcripts: Mapping[str, Transcript]


class RolloutRunner:
    """Makes box, world and sessions, lets the harness run under the limits, and scores while the world is open.

    Args:
        factory: makes the world.
        boxes: the pool; only tasks with a `box` take one.
        recorder: opens the sessions.
        harness: holds the conversation.
        config: limits, retries.
        report: called with a sentence for what a reader of the run has to know.
        places: most rollouts that run at once, by environment; others have no bound of their own.

    Attributes:
        breakers: of the environments.
        close_failures: the latest worlds and boxes that did not close; they change no outcome.
    """

    def __init__(
        self,
        factory: EnvFactory,
        boxes: Boxes,
        recorder: SessionRecorder,
        harness: Harness,
        config: RolloutConfig,
        *,
        report: Callable[[str], None] = lambda sentence: None,
        places: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._factory = factory
        self._boxes = boxes
        self._recorder = recorder
        self._harness = harness
        self.config = config
        self.report = report
        self._places = {name: asyncio.Semaphore(number) for name, number in places.items()}
        self.breakers = Breakers(config.outage_s, report)
        self.close_failures: deque[InfraError] = deque(maxlen=100)

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

        An attempt that the infrastructure broke is run again with the same seed, so it samples the same tokens. Is the
        world broken a second time in the same way (error class, place and message), after the policy had acted both
        times, then it was the policy. Engine and judge are no part of the world, and before its first token the policy
        has done nothing: such failures only ever leave the group.

        Args:
            task: its limits may be replaced by `[rollout]`.
            rollout_id: unique in the run; attempt n > 0 is recorded as `<rollout_id>/retry-<n>`.
            index: place in the group.
            seed: of the sampling.
            purpose: what the rollout is for.
            priority: the engine's.
            admission: number of its group; the engine serves the lowest of one priority first.

        Raises:
            CancelledError: the awaiting task was cancelled; world, box and sessions are closed.
            Outage: the environment's infrastructure stays down; see `Breaker`.
        """
        broken: list[Rollout] = []
        tried = partial(
            self.attempt, task, index=index, seed=seed, purpose=purpose, priority=priority, admission=admission
        )
        breaker, outages = self.breakers.of(task.env), 0
        for attempt in count():
            if attempt:
                await asyncio.sleep(retry_pause_s(self.config.retry_delay_s, attempt, seed))
            name = f"{rollout_id}/retry-{attempt}" if attempt else rollout_id
            async with self._place_of(task), breaker.trial(task.id) as trial:
                done = await tried(rollout_id=name, number=attempt)
                trial.error = done.error
            outages += trial.is_excused
            if done.error is None:
                return Finished(
                    rollout=done.rollout, score=done.score, broken=tuple(broken), transcripts=done.transcripts
                )
            if broken and _is_the_policys(done.error, broken[-1], done.rollout):
                failed = _ended(
                    done.rollout, Outcome(kind="policy_failed", reason="failure", failure=failure_of(done.error))
                )
                score = Score(reward=self.config.policy_failure_reward, success=False)
                return Finished(rollout=failed, score=score, broken=tuple(broken), transcripts=done.transcripts)
            if attempt - outages >= self.config.retries or isinstance(done.error, TaskError):
                break
            broken.append(done.rollout)
        return Finished(rollout=done.rollout, score=None, broken=tuple(broken))

    async def attempt(
        self,
        task: Task,
        *,
        rollout_id: str,
        index: int,
        seed: int,
        purpose: Purpose = "train",
        priority: int = 0,
        admission: int = 0,
        number: int = 0,
    ) -> Attempt:
        """Run a task once, its world closed whatever happens. `number` counts the attempts before it; the other
        arguments are those of `run`.

        Raises:
            BadInput: the harness asks for a role that the world does not name.
        """
        limits = self.config.limits(task.limits)
        task = task if limits == task.limits else replace(task, limits=limits)
        several = isinstance(self._factory, Domains)
        env = GuardedEnv(partial(self._factory.make_for, task) if several else self._factory.make)
        episode = RunningEpisode(
            task, env, self._recorder, rollout_id=rollout_id, seed=seed, priority=priority, admission=admission
        )
        made = partial(Rollout, id=rollout_id, task=task, index=index, attempt=number, purpose=purpose)
        rollout, score, error = await self._played(made, episode)
        return Attempt(rollout=rollout, score=score, error=error, transcripts=episode.transcripts())

    def _place_of(self, task: Task) -> AbstractAsyncContextManager[None]:
        """Return what holds one of the places of a task's environment."""
        return self._places.get(task.env) or nullcontext()

    async def _played(
        self, made: Callable[..., Rollout], episode: RunningEpisode
    ) -> tuple[Rollout, Score | None, InfraError | None]:
        """Play, score and close an episode. `made` takes the trajectories."""
        clock = asyncio.get_running_loop().time
        started, began = time.time(), clock()

        def recorded(outcome: Outcome) -> Rollout:
            timing = Timing(started=started, wall_s=clock() - began, world_s=episode.env.world_s)
            return made(trajectories=episode.trajectories(outcome, timing))

        try:
            await self._take_box(episode)
            outcome = await self._play(episode)
            rollout = recorded(outcome)
            score = await self._scored(episode, rollout) if outcome.trainable else None
            return rollout, score, None
        except PolicyFailure:  # the scorer's verdict: what was left behind cannot be scored
            score = Score(reward=self.config.policy_failure_reward, success=False)
            return recorded(MALFORMED), score, None
        except JudgeError as error:
            outcome = Outcome(kind="judge_failed", reason="failure", failure=failure_of(error))
            return recorded(outcome), None, error
        except InfraError as error:
            outcome = Outcome(kind="infra_failed", reason="failure", failure=failure_of(error))
            return recorded(outcome), None, error
        finally:
            self.close_failures.extend(await episode.close())

    async def _take_box(self, episode: RunningEpisode) -> None:
        """Give the episode its box. Waiting for one is not on the policy's clock.

        Raises:
            SandboxError: there is none, or not in time.
            TaskError: there are no such boxes.
        """
        if episode.task.box is None:
            return
        limit = asyncio.timeout(self.config.box_timeout_s)
        try:
            async with limit:
                episode.box = await self._boxes.take(episode.task.box)
        except BadInput as error:
            raise TaskError(str(error)) from error
        except TimeoutError:
            if not limit.expired():
                raise
            raise SandboxError(f"boxes.take: no box after {self.config.box_timeout_s} s") from None

    async def _play(self, episode: RunningEpisode) -> Outcome:
        """Let the harness run; how it ended when nothing broke."""
        limits = asyncio.timeout(episode.task.limits.timeout_s)
        try:
            async with limits:
                await self._harness.run(episode)
        except TimeoutError:
            if not limits.expired():
                raise
            return TIMEOUT
        except LimitReached as limit:
            return outcome_at(limit)
        except PolicyFailure:
            return MALFORMED
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller's wish, not the session's
            return CANCELLED
        return ANSWERED

    async def _scored(self, episode: RunningEpisode, rollout: Rollout) -> Score:
        """The world's score.

        Its reward is None where the world left scoring to a second pass.

        Raises:
            JudgeError: there is none in time.
        """
        limit = asyncio.timeout(self.config.score_timeout_s)
        try:
            async with limit:
                score = await episode.env.score(rollout.trajectories)
        except TimeoutError:
            if not limit.expired():
                raise
            raise JudgeError(f"env.score: no answer after {self.config.score_timeout_s} s") from None
        return episode.env.with_turns(score or Score(reward=None), rollout.trajectories)


def failure_of(error: InfraError) -> Failure:
    """An error for the record. Messages begin with the place that broke."""
    where, _, message = str(error).partition(": ")
    return Failure(error=type(error).__name__, where=where if message else "", message=message or where)


def _ended(rollout: Rollout, outcome: Outcome) -> Rollout:
    """The rollout with another outcome."""
    return replace(rollout, trajectories=tuple(replace(t, outcome=outcome) for t in rollout.trajectories))


def _is_the_policys(error: InfraError, before: Rollout, now: Rollout) -> bool:
    """Whether the same failure of the world followed the policy's acts twice."""
    return (
        not isinstance(error, (EngineError, JudgeError))
        and before.outcome.failure == failure_of(error)
        and all(sampled_tokens(rollout) > 0 for rollout in (before, now))
    )
