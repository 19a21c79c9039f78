"""Runs one rollout to its typed outcome (law 6)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from sparring.errors import InfraError, JudgeError, LimitReached, NotRebuildable, PolicyFailure, SandboxError, Suspended
from sparring.log import LogEntry
from sparring.observe.metrics import Metrics
from sparring.protocols import Boxes, EnvFactory, Harness
from sparring.record.transcript import Transcript
from sparring.rollout.attempt_log import AttemptLog
from sparring.rollout.attempts import Attempt, Attempts, broken_by, failure_of
from sparring.rollout.blame import Successes, WorldCalls
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import ANSWERED, GuardedEnv, RunningEpisode, SessionRecorder, outcome_at
from sparring.rollout.rebuild import Watch
from sparring.rollout.suspension import Suspension
from sparring.types import Outcome, Purpose, Rollout, Score, Task, Timing

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


class RolloutRunner:
    """Makes box, world and sessions, lets the harness run under the limits, and scores while the world is open.

    Args:
        factory: makes the world.
        boxes: the pool; only tasks with a `box` take one.
        recorder: opens the sessions.
        harness: holds the conversation.
        config: limits, retries.
        log: of attempts; unfinished rollouts of an earlier process go on from it. None: rollouts begin from nothing.

    Attributes:
        close_failures: the latest worlds and boxes that did not close; they change no outcome.
    """

    def __init__(
        self,
        factory: EnvFactory,
        boxes: Boxes,
        recorder: SessionRecorder,
        harness: Harness,
        config: RolloutConfig,
        log: AttemptLog | None = None,
    ) -> None:
        self._factory = factory
        self._boxes = boxes
        self._recorder = recorder
        self._harness = harness
        self._log = log
        self._successes = Successes()
        self._under_way: dict[str, Suspension] = {}
        self._metrics = Metrics()
        self.config = config
        self.close_failures: deque[InfraError] = deque(maxlen=100)

    async def run(
        self, task: Task, *, rollout_id: str, index: int, seed: int, purpose: Purpose = "train", priority: int = 0
    ) -> Finished:
        """Run a task to an outcome.

        An attempt that the infrastructure broke is rebuilt: the harness runs again on a fresh world, recorded replies
        answer it, and it goes on where it broke. Where the world or the harness does something else than before, or the
        world says that it cannot be rebuilt, the rollout starts over with the same seed. A failure of the world is the
        policy's only if the same call breaks again in three rebuilt worlds while other rollouts' calls are answered
        (law 6; see `rollout/blame.py`).

        Args:
            task: its limits may be replaced by `[rollout]`.
            rollout_id: unique in the run; see `Attempts` for the ids of attempts.
            index: place in the group.
            seed: of the sampling.
            purpose: what the rollout is for.
            priority: the engine's.

        Raises:
            CancelledError: the awaiting task was cancelled; world, box and sessions are closed.
        """
        made = partial(Rollout, task=self._limited(task), index=index, purpose=purpose)
        attempts = self._begun(rollout_id, made)
        play = partial(self.attempt, task, index=index, seed=seed, purpose=purpose, priority=priority)
        self._under_way[rollout_id] = attempts.suspension
        try:
            return await self._finished(rollout_id, attempts, play)
        finally:
            attempts.suspension.end()
            del self._under_way[rollout_id]
            self._metrics.add("rollout/rebuilt", attempts.rebuilt, "sum")
            self._metrics.add("rollout/started_over", len(attempts.started_over), "sum")

    async def suspend(self, rollout_id: str) -> bool:
        """Let a rollout give back its box and its cache before its next turn.

        Returns:
            True when it has; False where it ended without a further turn, or is not under way.
        """
        suspension = self._under_way.get(rollout_id)
        return suspension is not None and await suspension.request()

    def resume(self, rollout_id: str) -> None:
        """Let a suspended rollout go on: it is rebuilt to where it was."""
        self._under_way[rollout_id].resume()

    def _begun(self, rollout_id: str, made: Callable[..., Rollout]) -> Attempts:
        """Return the account of a rollout's attempts, with what an earlier process recorded of them."""
        attempts = Attempts(rollout_id, self.config.retries, WorldCalls(self._successes))
        unfinished = None if self._log is None else self._log.unfinished(rollout_id)
        if unfinished is not None:
            attempts.resume(unfinished, made)
        return attempts

    async def _finished(self, rollout_id: str, attempts: Attempts, play: Callable[..., Awaitable[Attempt]]) -> Finished:
        """Play attempts until one comes to an outcome, or no other one may be made."""
        again = True
        while again:
            if attempts.failures:
                await asyncio.sleep(self.config.retry_delay_s * 2**attempts.idle)
            done = await play(rollout_id=attempts.id, attempts=attempts)
            if done.error is None:
                broken = attempts.finished(done)
                return Finished(rollout=done.rollout, score=done.score, broken=broken, transcripts=done.transcripts)
            if isinstance(done.error, Suspended):
                attempts.suspended(done)
                await attempts.suspension.stop()
                continue
            if attempts.is_the_policys(done):
                failed = _ended(done.rollout, replace(broken_by(done.error), kind="policy_failed"))
                score = Score(reward=self.config.policy_failure_reward, success=False)
                broken = attempts.finished(done)
                return Finished(rollout=failed, score=score, broken=broken, transcripts=done.transcripts)
            again = attempts.failed(done)
            if self._log is not None and attempts.id != done.rollout.id:
                self._log.start_over(rollout_id, attempts.id, attempts.number, attempts.started_over[-1])
        last, broken = attempts.given_up()
        return Finished(rollout=last, score=None, broken=broken)

    @property
    def rebuilds(self) -> bool:
        """Whether unfinished rollouts of an earlier process go on."""
        return self._log is not None

    def metrics(self) -> dict[str, float]:
        """Return the attempts since the last call that were rebuilt, and those that started over."""
        return {"rollout/rebuilt": 0.0, "rollout/started_over": 0.0, **self._metrics.take()}

    async def attempt(
        self,
        task: Task,
        *,
        rollout_id: str,
        index: int,
        seed: int,
        purpose: Purpose = "train",
        priority: int = 0,
        attempts: Attempts | None = None,
    ) -> Attempt:
        """Run a task once, its world closed whatever happens. `attempts` are those before it, from which it goes on;
        the other arguments are those of `run`.

        Raises:
            BadInput: the harness asks for a role that the world does not name.
        """
        task = self._limited(task)
        before = attempts or Attempts(rollout_id, 0, WorldCalls(self._successes))
        watch = Watch(before.record, before.calls, self._entry(rollout_id))
        before.suspension.begin(watch)
        env = GuardedEnv(self._factory.make, watch)
        episode = RunningEpisode(task, env, self._recorder, rollout_id=rollout_id, seed=seed, priority=priority)
        made = partial(Rollout, id=rollout_id, task=task, index=index, attempt=before.number, purpose=purpose)
        rollout, score, error = await self._played(made, episode)
        if watch.replies.difference is not None and not isinstance(error, NotRebuildable):
            error = NotRebuildable(watch.replies.difference)  # the harness went on all the same
            rollout, score = _ended(rollout, broken_by(error)), None
        return Attempt(
            rollout=rollout,
            score=score,
            error=error,
            transcripts=episode.transcripts(),
            record=watch.record(rollout.trajectories) if error is not None and env.rebuildable else None,
            rebuilt=watch.rebuilt,
            broken=watch.broken,
        )

    def _limited(self, task: Task) -> Task:
        """Return the task with the limits of the run."""
        limits = self.config.limits(task.limits)
        return task if limits == task.limits else replace(task, limits=limits)

    def _entry(self, attempt: str) -> Callable[[str, int, int], LogEntry] | None:
        """Return what makes the log's entries about a world's answers in an attempt."""
        return None if self._log is None else partial(self._log.observation, attempt)

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
            episode.env.watch.check()
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
            return recorded(broken_by(error)), None, error
        finally:
            self.close_failures.extend(await episode.close())

    async def _take_box(self, episode: RunningEpisode) -> None:
        """Give the episode its box. Waiting for one is not on the policy's clock.

        Raises:
            SandboxError: there is none, or not in time.
        """
        if episode.task.box is None:
            return
        limit = asyncio.timeout(self.config.box_timeout_s)
        try:
            async with limit:
                episode.box = await self._boxes.take(episode.task.box)
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


def _ended(rollout: Rollout, outcome: Outcome) -> Rollout:
    """The rollout with another outcome."""
    return replace(rollout, trajectories=tuple(replace(t, outcome=outcome) for t in rollout.trajectories))
