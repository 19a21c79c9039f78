"""Plays one attempt at a rollout: open, play, score, close (law 6)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from sparring.backoff import retry_pause_s
from sparring.envs.domains import factory_of
from sparring.envs.executor import Executor, InlineExecutor
from sparring.envs.preparation import Preparation
from sparring.errors import (
    BadInput,
    EnvError,
    HarnessError,
    InfraError,
    JudgeError,
    LimitReached,
    NotRebuildable,
    PolicyFailure,
    TaskError,
    boundary,
)
from sparring.observe.metrics import Metrics
from sparring.protocols import Boxes, EnvFactory, Harness, Snapshot
from sparring.record.rewards import OutsideRewards
from sparring.rollout.attempts import Attempt
from sparring.rollout.blame import OPENING, AttemptCalls, WorldCalls
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import RunningEpisode, SessionRecorder
from sparring.rollout.guarded_env import GuardedEnv
from sparring.rollout.journal import Journal, Journals, Playback
from sparring.rollout.metrics import HarnessEnds
from sparring.rollout.outcomes import ANSWERED, CANCELLED, MALFORMED, broken_by, ended_as, is_about, outcome_at
from sparring.rollout.phases import Phases, Waits
from sparring.rollout.stalls import Stalls
from sparring.types import BoxSpec, Outcome, Purpose, Rollout, Score, Task, Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """Request for a rollout.

    Attributes:
        task: task with the limits of the run.
        index: place of the rollout in its group.
        admission: index of the group; the engine serves the lowest first.
    """

    task: Task
    index: int
    seed: int
    purpose: Purpose = "train"
    admission: int = 0

    def rollout(self, **parts: Any) -> Rollout:
        """Return a rollout of this request. `parts` are its id, the number of its attempt, and its trajectories."""
        return Rollout(task=self.task, index=self.index, purpose=self.purpose, **parts)


@dataclass(eq=False)
class Player:
    """Player of single attempts: opens box, environment and sessions, runs the harness under the limits, and scores the
    result while the environment is open.

    Attributes:
        boxes: pool of boxes, for tasks with a `box`.
        recorder: opener of sessions, which are answered by the journal, then by an engine.
        config: limits and retries.
        executors: makes the executor of an environment; `shared` is the factory's `shared_thread`. With
            `InlineExecutor`, an environment that blocks also blocks the event loop.
        box_starts: limit on boxes that start at once; a waiting attempt is in the phase `box queue`. None: no limit.
        log: journals of the attempts. With a store, rollouts that an earlier process began are resumed.
        close_failures: latest errors of closing environments and boxes; they change no outcome.
        abandoned: number of environments whose code continued after it was cancelled.
    """

    factory: EnvFactory
    boxes: Boxes
    recorder: SessionRecorder
    harness: Harness
    config: RolloutConfig
    _: KW_ONLY
    executors: Callable[..., Executor] = InlineExecutor
    box_starts: asyncio.Semaphore | None = None
    log: Journals = field(default_factory=Journals)
    report: Callable[[str], None] = lambda sentence: None

    def __post_init__(self) -> None:
        self._widens: Callable[..., BoxSpec] | None = getattr(self.harness, "box_of", None)
        self._metrics = Metrics()
        self._ends = HarnessEnds(self._metrics, lambda sentence: self.report(sentence))
        self.close_failures: deque[InfraError] = deque(maxlen=100)
        self.waits = Waits(self.config)
        self._stalls = Stalls(self.waits, self.config.timeouts.stalled_s, lambda sentence: self.report(sentence))
        self.abandoned = 0

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of a prompt and its reply together; None if replies are text."""
        return getattr(self.recorder, "max_context", None)

    def phases(self, name: str) -> Phases:
        """Return the phases of an attempt or of a group's scoring, under this player's limits."""
        return Phases(self.waits, rollout_id=name, recorded=self._record_event)

    async def play(
        self,
        request: RolloutRequest,
        journal: Journal,
        number: int,
        calls: WorldCalls,
        prepared: Snapshot | None = None,
    ) -> Attempt:
        """Play an attempt: the journal first, then the engine. Its world is always closed.

        Args:
            journal: journal of the attempt; new events are appended.
            prepared: snapshot that the attempt's box is forked from; None: its world prepares the box.
        """
        preparation = Preparation(prepared)
        episode = self._episode(request, journal, calls, preparation)
        playback, rewards = episode.env.playback, episode.rewards
        rollout = partial(request.rollout, id=journal.attempt, attempt=number)
        try:
            attempt = await self._conclude(episode, rollout)
            if rewards is not None and rewards.offered and attempt.error is None:
                attempt = await self._add_outside_rewards(attempt, rewards)
        finally:
            if rewards is not None:
                await rewards.close()
        if playback.difference is not None and not isinstance(attempt.error, NotRebuildable):
            error = NotRebuildable(playback.difference)  # the harness hid it
            attempt = replace(attempt, rollout=ended_as(attempt.rollout, broken_by(error)), score=None, error=error)
        broken = episode.env.calls.broken
        boxless = self._box_of(episode) is not None and episode.box is None
        return replace(
            attempt,
            is_rebuild=playback.is_rebuild,
            caught_up=not playback.num_left and not isinstance(attempt.error, NotRebuildable),
            rebuildable=episode.env.rebuildable and journal.holds(attempt.rollout.trajectories),
            broken=broken,
            broken_call=broken.call if broken is not None else OPENING if boxless else None,
            is_fork=preparation.is_fork,
            prepared=preparation.snapshot if attempt.error is not None else None,
        )

    def _episode(
        self, request: RolloutRequest, journal: Journal, calls: WorldCalls, preparation: Preparation
    ) -> RunningEpisode:
        """Return the episode of an attempt, before anything is opened."""
        factory = factory_of(self.factory, request.task)
        env = GuardedEnv(
            factory.make,
            self.executors(shared=getattr(factory, "shared_thread", False)),
            self.phases(journal.attempt),
            timeout_s=request.task.limits.timeout_s,
            at_once=getattr(factory, "makes_at_once", False),
            calls=AttemptCalls(calls, Playback(journal)),
            preparation=preparation,
        )
        return RunningEpisode(
            request.task,
            env,
            self.recorder,
            rollout_id=journal.attempt,
            seed=request.seed,
            admission=request.admission,
            rewards=self._outside_rewards(journal),
        )

    async def _conclude(self, episode: RunningEpisode, make_rollout: Callable[..., Rollout]) -> Attempt:
        """Bring an episode to its outcome, or to the error that broke it."""
        clock = asyncio.get_running_loop().time
        started, began = time.time(), clock()
        scoring = False
        self._stalls.start()

        def finish(outcome: Outcome, score: Score | None = None, error: InfraError | None = None) -> Attempt:
            episode.env.playback.close()
            timing = Timing(started=started, wall_s=clock() - began, world_s=episode.env.world_s)
            return Attempt(
                rollout=make_rollout(trajectories=episode.trajectories(outcome, timing)),
                score=score,
                error=error,
                transcripts=episode.transcripts(),
                unjudged=scoring and isinstance(error, JudgeError),
            )

        try:
            await self._open(episode)
            outcome = await self._run_harness(episode)
            episode.env.playback.end()
            silent = episode.silent(self.harness, self.config.speaks) if outcome.trainable else None
            attempt = finish(silent or outcome)
            if silent is not None or not outcome.trainable:
                return attempt
            scoring = True
            return replace(attempt, score=await self._score(episode, attempt.rollout))
        except PolicyFailure as failure:
            if scoring:  # raised by the scorer: there is nothing left to score
                return finish(MALFORMED, Score(reward=self.config.rewards.policy_failure, success=False))
            error = EnvError(f"environment {episode.task.env}: {failure}")  # raised before the policy's first action
            return finish(broken_by(error), error=error)
        except InfraError as error:
            return finish(broken_by(error), error=error)
        finally:
            await self._close(episode)

    async def _open(self, episode: RunningEpisode) -> None:
        """Make the environment and open the episode's box. If the harness extends the box for the environment's tools,
        the environment is made first."""
        if self._widens:
            await episode.env.make()
        await self._take_box(episode)
        await episode.env.make()

    async def _close(self, episode: RunningEpisode) -> None:
        self.close_failures.extend(await episode.close())
        self.abandoned += episode.env.abandoned
        self._stalls.reset()

    async def _take_box(self, episode: RunningEpisode) -> None:
        """Open the episode's box. The time limit covers the start of the box, but not the wait until it may start.

        Raises:
            SandboxError: no box could be opened in time.
            TaskError: no pool has boxes for the task.
        """
        spec = self._box_of(episode)
        if spec is None:
            return
        phases, starts = episode.env.phases, self.box_starts or asyncio.Semaphore()
        with phases.within("box queue"):
            await starts.acquire()
        try:
            with phases.within("box"):
                episode.box = await episode.env.preparation.take(self.boxes, spec)
        except BadInput as error:
            raise TaskError(str(error)) from error
        finally:
            starts.release()

    def _box_of(self, episode: RunningEpisode) -> BoxSpec | None:
        """Return the spec of an episode's box: the task's, extended by a harness that runs a program; None if it needs
        no box."""
        if self._widens is None:
            return episode.task.box
        return self._widens(episode.task, tools=bool(episode.env.tools))

    async def _run_harness(self, episode: RunningEpisode) -> Outcome:
        """Run the harness and return its outcome. Raises InfraError if the infrastructure broke the attempt. A time
        limit that was hit, or an unanswered request, is raised even if the harness ended normally."""
        phases, outcome = episode.env.phases, ANSWERED
        try:
            with phases.within("harness"), boundary(HarnessError, "harness"):
                await InlineExecutor().run(self.harness.run, episode)
        except PolicyFailure as ended:
            episode.ended_by = ended
            outcome = outcome_at(ended) if isinstance(ended, LimitReached) else MALFORMED
        except HarnessError as error:  # a client wraps the error of its request
            if episode.limit is None:
                raise phases.struck or episode.failure or error from None
            if not is_about(error, episode.limit):
                episode.note("harness", {"error": str(error)})
            outcome = outcome_at(episode.limit)
        except InfraError as error:
            raise phases.struck or error from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller cancelled the attempt, not the session
            outcome = CANCELLED
        failure = phases.struck or episode.failure
        if failure is not None:
            raise failure
        return outcome

    async def _score(self, episode: RunningEpisode, rollout: Rollout) -> Score:
        """Return the environment's score. If its judge fails, the same conversation is scored again. The reward is None
        if the environment leaves it to a second scoring pass. Raises JudgeError if the judge failed in all retries."""
        for retry in range(self.config.retries.rebuilds + 1):
            if retry:
                await asyncio.sleep(retry_pause_s(self.config.retries.delay_s, retry, "score", rollout.id))
            try:
                score = await episode.env.score(rollout.trajectories)
                return episode.env.with_turns(score or Score(reward=None), rollout.trajectories)
            except JudgeError:
                if retry == self.config.retries.rebuilds or episode.env.abandoned:
                    raise
        raise AssertionError("the last try returns or raises")

    def _outside_rewards(self, journal: Journal) -> OutsideRewards | None:
        """Return the receiver of an attempt's rewards from outside, with the rewards of the journal; None if the run
        takes none."""
        if self.config.rewards.within_s is None:
            return None
        return OutsideRewards(
            journal.attempt,
            self.config.rewards.within_s,
            by_sampler=self.config.rewards.under == "any_key",
            before=journal.rewards,
            record=journal.rewarded,
            expire=partial(self._metrics.add, "rollout/rewards_expired", 1, "sum"),
        )

    async def _add_outside_rewards(self, attempt: Attempt, rewards: OutsideRewards) -> Attempt:
        """Wait for the final reward from outside, or for its time limit, and return the attempt with its rewards from
        outside. If the policy failed, nothing is awaited, because the sender may be gone: the attempt keeps its own
        score unless the final reward has arrived already."""
        if attempt.score is None or attempt.rollout.outcome.kind == "policy_failed" and not rewards.final:
            return attempt
        trajectory = attempt.rollout.trajectories[0]
        in_time = await rewards.wait()
        self._metrics.add("rollout/rewards_missing", not in_time, "sum")
        self._metrics.add("rollout/rewards_expired", 0, "sum")
        self._metrics.add("rollout/rewards_of_no_turn", rewards.of_no_turn(trajectory), "sum")
        return replace(attempt, score=rewards.score(attempt.score, trajectory))

    def _record_event(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        """Record an event of an attempt, and report an abandoned environment."""
        self.log.note(kind, name, data)
        self._ends.take(kind, name, data)
        if kind == "abandoned":
            self.report(f"{name}: its environment ignores cancellation in {data['call']} and is left behind")
