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
from typing import Any

from sparring.backoff import retry_pause_s
from sparring.envs.domains import Domains
from sparring.envs.executor import Executor, InlineExecutor
from sparring.errors import (
    BadInput,
    EngineError,
    EnvError,
    InfraError,
    JudgeError,
    LimitReached,
    PolicyFailure,
    TaskError,
    boundary,
)
from sparring.protocols import Boxes, EnvFactory, Harness
from sparring.record.transcript import Transcript
from sparring.rollout.breaker import Breakers
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import ANSWERED, GuardedEnv, RunningEpisode, SessionRecorder, outcome_at
from sparring.rollout.lengths import sampled_tokens
from sparring.rollout.phases import Phases, Recorded, Waits, unrecorded
from sparring.rollout.stalls import Stalls
from sparring.types import Failure, Outcome, Purpose, Rollout, Score, Task, Timing

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
    """One try at a task: its record in tokens and in messages, and the infrastructure's error if that ended it.

    Attributes:
        unjudged: the conversation is whole and only its judge failed, so it is not sampled again.
    """

    rollout: Rollout
    score: Score | None
    error: InfraError | None
    transcripts: Mapping[str, Transcript]
    unjudged: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Machinery:
    """Machinery around the environments of a runner.

    Attributes:
        executors: makes the executor of an environment, with `shared` as its factory says; an environment that blocks
            stops `InlineExecutor` and its event loop.
        recorded: takes note of the limits that strike and of the environments that are abandoned.
    """

    executors: Callable[..., Executor] = InlineExecutor
    recorded: Recorded = unrecorded


class RolloutRunner:
    """Runner of single rollouts: makes box, environment and sessions, lets the harness run under the limits, and scores
    while the environment is open.

    Args:
        factory: makes the environment.
        boxes: the pool; only tasks with a `box` take one.
        recorder: opens the sessions.
        harness: holds the conversation.
        config: limits, retries.
        report: called with a sentence for what a reader of the run has to know.
        places: most rollouts that run at once, by environment; others have no bound of their own.
        machinery: executors of environments, and the log of events.

    Attributes:
        breakers: of the environments.
        close_failures: the latest environments and boxes that did not close; they change no outcome.
        waits: the phases that are under way.
        abandoned: environments whose code went on although it was cancelled.
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
        machinery: Machinery = Machinery(),
    ) -> None:
        self._factory = factory
        self._boxes = boxes
        self._recorder = recorder
        self._harness = harness
        self.config = config
        self.machinery = machinery
        self.report = report
        self._places = {name: asyncio.Semaphore(number) for name, number in places.items()}
        self.breakers = Breakers(config.outage_s, report)
        self.close_failures: deque[InfraError] = deque(maxlen=100)
        self.waits = Waits(config)
        self._stalls = Stalls(self.waits, config.stalled_s, lambda sentence: self.report(sentence))
        self.abandoned = 0

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
        self._stalls.start()
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
            if done.unjudged or attempt - outages >= self.config.retries or isinstance(done.error, TaskError):
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
        factory = self._factory.factories[task.env] if isinstance(self._factory, Domains) else self._factory
        executor = self.machinery.executors(shared=getattr(factory, "shared_thread", False))
        env = GuardedEnv(
            factory.make,
            executor,
            self.phases(rollout_id),
            timeout_s=limits.timeout_s,
            at_once=getattr(factory, "makes_at_once", False),
        )
        episode = RunningEpisode(
            task, env, self._recorder, rollout_id=rollout_id, seed=seed, priority=priority, admission=admission
        )
        made = partial(Rollout, id=rollout_id, task=task, index=index, attempt=number, purpose=purpose)
        return await self._played(made, episode)

    def phases(self, name: str) -> Phases:
        """Return the phases of an attempt or of a group's scoring, under this runner's limits."""
        return Phases(self.waits, rollout_id=name, recorded=self._note)

    def _note(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        """Take note of an event; that an environment was abandoned is also said."""
        self.machinery.recorded(kind, name, data)
        if kind == "abandoned":
            self.report(f"{name}: its environment ignores cancellation in {data['call']} and is left behind")

    def _place_of(self, task: Task) -> AbstractAsyncContextManager[None]:
        """Return what holds one of the places of a task's environment."""
        return self._places.get(task.env) or nullcontext()

    async def _played(self, made: Callable[..., Rollout], episode: RunningEpisode) -> Attempt:
        """Play, score and close an episode. `made` takes the trajectories."""
        clock = asyncio.get_running_loop().time
        started, began = time.time(), clock()
        scoring = False

        def left(outcome: Outcome) -> Rollout:
            timing = Timing(started=started, wall_s=clock() - began, world_s=episode.env.world_s)
            return made(trajectories=episode.trajectories(outcome, timing))

        def ended(rollout: Rollout, score: Score | None, error: InfraError | None = None) -> Attempt:
            unjudged = scoring and isinstance(error, JudgeError)
            return Attempt(
                rollout=rollout, score=score, error=error, transcripts=episode.transcripts(), unjudged=unjudged
            )

        try:
            await self._take_box(episode)
            await episode.env.make()
            outcome = await self._play(episode)
            rollout = left(outcome)
            scoring = True
            return ended(rollout, await self._scored(episode, rollout) if outcome.trainable else None)
        except PolicyFailure:  # the scorer's verdict: what was left behind cannot be scored
            return ended(left(MALFORMED), Score(reward=self.config.policy_failure_reward, success=False))
        except InfraError as error:
            kind = "judge_failed" if isinstance(error, JudgeError) else "infra_failed"
            return ended(left(Outcome(kind=kind, reason="failure", failure=failure_of(error))), None, error)
        finally:
            self.close_failures.extend(await episode.close())
            self.abandoned += episode.env.abandoned
            self._stalls.reset()

    async def _take_box(self, episode: RunningEpisode) -> None:
        """Give the episode its box. Waiting for one is not on the policy's clock.

        Raises:
            SandboxError: there is none, or not in time.
            TaskError: there are no such boxes.
        """
        if episode.task.box is None:
            return
        try:
            with episode.env.phases.within("box"):
                episode.box = await self._boxes.take(episode.task.box)
        except BadInput as error:
            raise TaskError(str(error)) from error

    async def _play(self, episode: RunningEpisode) -> Outcome:
        """Let the harness run; return how it ended when nothing broke.

        Raises:
            InfraError: something broke. Of a limit that struck it is the error, whatever the harness made of it.
        """
        phases = episode.env.phases
        try:
            outcome = await self._held(episode)
        except InfraError as error:
            raise phases.struck or error from None
        if phases.struck is not None:
            raise phases.struck
        return outcome

    async def _held(self, episode: RunningEpisode) -> Outcome:
        """Let the harness run."""
        try:
            with episode.env.phases.within("harness"):
                with boundary(EnvError, "harness"):
                    await InlineExecutor().run(self._harness.run, episode)
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
        """Return the environment's score. A judge that fails is asked again about the same conversation.

        Its reward is None where the environment left scoring to a second pass.

        Raises:
            JudgeError: there is none after all retries.
        """
        for retry in range(self.config.retries + 1):
            if retry:
                await asyncio.sleep(retry_pause_s(self.config.retry_delay_s, retry, "score", rollout.id))
            try:
                score = await episode.env.score(rollout.trajectories)
                return episode.env.with_turns(score or Score(reward=None), rollout.trajectories)
            except JudgeError:
                if retry == self.config.retries or episode.env.abandoned:
                    raise
        raise AssertionError("the last try returns or raises")


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
        and error.limit_s is None
        and before.outcome.failure == failure_of(error)
        and all(sampled_tokens(rollout) > 0 for rollout in (before, now))
    )
