"""Runs one rollout to its typed outcome (law 6)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sparring.backoff import retry_pause_s
from sparring.envs.domains import Domains, factory_of
from sparring.envs.executor import Executor, InlineExecutor
from sparring.errors import (
    BadInput,
    EnvError,
    HarnessError,
    InfraError,
    JudgeError,
    LimitReached,
    NotRebuildable,
    PolicyFailure,
    RequestRefused,
    TaskError,
    WorkerLost,
    boundary,
)
from sparring.observe.metrics import Metrics
from sparring.protocols import Boxes, EnvFactory, Harness
from sparring.record.branches import Transcript
from sparring.record.rewards import OutsideRewards
from sparring.rollout.attempt_log import AttemptLog
from sparring.rollout.attempts import Attempt, Attempts
from sparring.rollout.blame import OPENING, Successes, WorldCalls
from sparring.rollout.breaker import Breakers
from sparring.rollout.config import RolloutConfig
from sparring.rollout.episode import GuardedEnv, RunningEpisode, SessionRecorder
from sparring.rollout.load import CappedBoxes, Places
from sparring.rollout.metrics import HarnessEnds
from sparring.rollout.outcomes import ANSWERED, CANCELLED, MALFORMED, broken_by, ended_as, is_about, outcome_at
from sparring.rollout.phases import Phases, Waits
from sparring.rollout.rebuild import Watch
from sparring.rollout.stalls import Stalls
from sparring.types import BoxSpec, Outcome, Purpose, Rollout, Score, Task, Timing


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


class RolloutRunner:
    """Runner of single rollouts: makes box, environment and sessions, lets the harness run under the limits, and scores
    while the environment is open.

    Args:
        factory: makes the environment.
        boxes: the pool; only tasks with a `box` take one. Of `CappedBoxes`, an attempt that waits for others to start
            theirs is in the phase `box queue`, which has no limit.
        recorder: opens the sessions.
        harness: holds the conversation.
        config: limits, retries.
        executors: makes the executor of an environment, with `shared` as the factory says; an environment that blocks
            stops `InlineExecutor` and its event loop.
        log: of attempts; unfinished rollouts of an earlier process go on from one with a store.
        report: called with a sentence for what a reader of the run has to know.

    Attributes:
        breakers: of the environments.
        places: of the rollouts that a scheduler has in flight.
        close_failures: the latest environments and boxes that did not close; they change no outcome.
        waits: the phases that are under way.
        abandoned: environments whose code went on although it was cancelled.
        log: of attempts.
    """

    def __init__(
        self,
        factory: EnvFactory,
        boxes: Boxes,
        recorder: SessionRecorder,
        harness: Harness,
        config: RolloutConfig,
        *,
        executors: Callable[..., Executor] = InlineExecutor,
        log: AttemptLog = AttemptLog(),
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._factory = factory
        self._boxes, self._starts = (boxes.pool, boxes.starts) if isinstance(boxes, CappedBoxes) else (boxes, None)
        self._recorder = recorder
        self._harness = harness
        self._name = getattr(harness, "name", type(harness).__name__)
        self._widens: Callable[..., BoxSpec] | None = getattr(harness, "box_of", None)
        self.config = config
        self.executors = executors
        self.log = log
        self._successes: defaultdict[str, Successes] = defaultdict(Successes)  # by environment
        self._metrics = Metrics()
        self.report = report
        self._ends = HarnessEnds(self._metrics, lambda sentence: self.report(sentence))
        places = factory.places if isinstance(factory, Domains) else {}
        self._places = {name: asyncio.Semaphore(number) for name, number in places.items()}
        self.places = Places(config.max_concurrent_rollouts)
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
            admission: number of its group; the engine serves the lowest of one priority first.

        Raises:
            CancelledError: the awaiting task was cancelled; world, box and sessions are closed.
            Outage: the environment's infrastructure stays down; see `Breaker`.
        """
        made = partial(Rollout, task=self._limited(task), index=index, purpose=purpose)
        attempts = self._begun(rollout_id, task, made)
        play = partial(
            self.attempt, task, index=index, seed=seed, purpose=purpose, priority=priority, admission=admission
        )
        try:
            return await self._finished(rollout_id, task, attempts, play)
        finally:
            self._metrics.add("rollout/rebuilt", attempts.rebuilt, "sum")
            self._metrics.add("rollout/started_over", len(attempts.started_over), "sum")

    @property
    def max_context(self) -> int | None:
        """Most ids that a prompt of the policy and its reply may have together; None where replies are text."""
        return getattr(self._recorder, "max_context", None)

    def _begun(self, rollout_id: str, task: Task, made: Callable[..., Rollout]) -> Attempts:
        """Return the account of a rollout's attempts, with what an earlier process recorded of them."""
        attempts = Attempts(rollout_id, self.config.retries, WorldCalls(self._successes[task.env]))
        unfinished = self.log.unfinished(rollout_id)
        if unfinished is not None:
            attempts.resume(unfinished, made)
        return attempts

    async def _finished(
        self, rollout_id: str, task: Task, attempts: Attempts, play: Callable[..., Awaitable[Attempt]]
    ) -> Finished:
        """Play attempts until one comes to an outcome, or no other one may be made."""
        breaker, again = self.breakers.of(task.env), True
        while again:
            if attempts.failures:
                await asyncio.sleep(retry_pause_s(self.config.retry_delay_s, attempts.idle + 1, rollout_id))
            async with self._place_of(task), breaker.trial(task.id) as trial:
                attempts.calls.answered = trial.answered
                done = await play(rollout_id=attempts.id, attempts=attempts)
                trial.error = None if isinstance(done.error, NotRebuildable) else done.error
                trial.broken = done.broken_call
            if isinstance(done.error, WorkerLost):
                self._metrics.add("rollout/workers_lost", 1, "sum")
            if done.error is None:
                broken = attempts.finished(done)
                return Finished(rollout=done.rollout, score=done.score, broken=broken, transcripts=done.transcripts)
            if done.unjudged:
                broken = attempts.finished(done)
                return Finished(rollout=done.rollout, score=None, broken=broken, transcripts=done.transcripts)
            if attempts.is_the_policys(done):
                failed = ended_as(done.rollout, replace(broken_by(done.error), kind="policy_failed"))
                score = Score(reward=self.config.policy_failure_reward, success=False)
                broken = attempts.finished(done)
                return Finished(rollout=failed, score=score, broken=broken, transcripts=done.transcripts)
            final = isinstance(done.error, (RequestRefused, TaskError))
            again = attempts.failed(done, excused=trial.is_excused) and not final
            if attempts.id != done.rollout.id:
                self.report(f"{rollout_id} starts over as {attempts.id}: {attempts.started_over[-1]}")
                self.log.start_over(rollout_id, attempts.id, attempts.number, attempts.started_over[-1])
        last, broken = attempts.given_up()
        return Finished(rollout=last, score=None, broken=broken)

    def metrics(self) -> dict[str, float]:
        """Return the attempts since the last call that were rebuilt, and those that started over."""
        return self._metrics.take()

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
        attempts: Attempts | None = None,
    ) -> Attempt:
        """Run a task once, its world closed whatever happens. `attempts` are those before it, from which it goes on;
        the other arguments are those of `run`.

        Raises:
            BadInput: the harness asks for a role that the world does not name.
        """
        task = self._limited(task)
        before = attempts or Attempts(rollout_id, 0, WorldCalls(self._successes[task.env]))
        watch = Watch(before.record, before.calls, self.log.entries_of(rollout_id))
        factory = factory_of(self._factory, task)
        executor = self.executors(shared=getattr(factory, "shared_thread", False))
        env = GuardedEnv(
            factory.make,
            executor,
            self.phases(rollout_id),
            timeout_s=task.limits.timeout_s,
            at_once=getattr(factory, "makes_at_once", False),
            watch=watch,
        )
        rewards = self._rewards(rollout_id, rebuilt=before.record is not None)
        episode = RunningEpisode(
            task,
            env,
            self._recorder,
            rollout_id=rollout_id,
            seed=seed,
            priority=priority,
            admission=admission,
            rewards=rewards,
        )
        made = partial(Rollout, id=rollout_id, task=task, index=index, attempt=before.number, purpose=purpose)
        try:
            done = await self._played(made, episode)
            if rewards is not None and rewards.offered and done.error is None:
                done = await self._rewarded(done, rewards)
        finally:
            if rewards is not None:
                await rewards.close()
        if watch.replies.difference is not None and not isinstance(done.error, NotRebuildable):
            error = NotRebuildable(watch.replies.difference)  # the harness went on all the same
            done = replace(done, rollout=ended_as(done.rollout, broken_by(error)), score=None, error=error)
        if done.error is None:
            return done
        record = watch.record(done.rollout.trajectories) if env.rebuildable else None
        boxless = self._box_of(episode) is not None and episode.box is None
        call = watch.broken.call if watch.broken else OPENING if boxless else None
        return replace(done, record=record, rebuilt=watch.rebuilt, broken=watch.broken, broken_call=call)

    def _rewards(self, attempt: str, *, rebuilt: bool) -> OutsideRewards | None:
        """Return where an attempt gets its rewards from outside; None where the run takes none. Those that were taken
        before it was rebuilt count again."""
        if self.config.rewards_within_s is None:
            return None
        return OutsideRewards(
            attempt,
            self.config.rewards_within_s,
            by_sampler=self.config.rewards_under == "any_key",
            before=self.log.rewards(attempt) if rebuilt else (),
            record=partial(self.log.reward, attempt),
            expire=partial(self._metrics.add, "rollout/rewards_expired", 1, "sum"),
        )

    async def _rewarded(self, done: Attempt, rewards: OutsideRewards) -> Attempt:
        """Return an attempt with its rewards from outside, when the final one has come or is late. What the policy
        broke keeps its score where none has come yet: nobody may be left to give one."""
        if done.score is None or done.rollout.outcome.kind == "policy_failed" and not rewards.final:
            return done
        in_time = await rewards.wait()
        self._metrics.add("rollout/rewards_missing", not in_time, "sum")
        self._metrics.add("rollout/rewards_expired", 0, "sum")
        of_no_turn = rewards.of_no_turn(done.rollout.trajectories[0])
        self._metrics.add("rollout/rewards_of_no_turn", of_no_turn, "sum")
        return replace(done, score=rewards.score(done.score, done.rollout.trajectories[0]))

    def phases(self, name: str) -> Phases:
        """Return the phases of an attempt or of a group's scoring, under this runner's limits."""
        return Phases(self.waits, rollout_id=name, recorded=self._note)

    def _note(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        """Take note of an event; that an environment was abandoned is also said."""
        self.log.note(kind, name, data)
        self._ends.take(kind, name, data)
        if kind == "abandoned":
            self.report(f"{name}: its environment ignores cancellation in {data['call']} and is left behind")

    def _place_of(self, task: Task) -> AbstractAsyncContextManager[None]:
        """Return what holds one of the places of a task's environment."""
        return self._places.get(task.env) or nullcontext()

    def _limited(self, task: Task) -> Task:
        """Return the task with the limits of the run."""
        limits = self.config.limits(task.limits)
        return task if limits == task.limits else replace(task, limits=limits)

    async def _played(self, made: Callable[..., Rollout], episode: RunningEpisode) -> Attempt:
        """Play, score and close an episode. `made` takes the trajectories."""
        clock = asyncio.get_running_loop().time
        started, began = time.time(), clock()
        scoring = False
        self._stalls.start()

        def left(outcome: Outcome) -> Rollout:
            timing = Timing(started=started, wall_s=clock() - began, world_s=episode.env.world_s)
            return made(trajectories=episode.trajectories(outcome, timing))

        def ended(rollout: Rollout, score: Score | None, error: InfraError | None = None) -> Attempt:
            unjudged = scoring and isinstance(error, JudgeError)
            return Attempt(
                rollout=rollout, score=score, error=error, transcripts=episode.transcripts(), unjudged=unjudged
            )

        try:
            if self._widens:
                await episode.env.make()
            await self._take_box(episode)
            await episode.env.make()
            outcome = await self._play(episode)
            episode.env.watch.check()
            silent = episode.silent(self._name, self.config.speaks) if outcome.trainable else None
            if silent is not None:
                return ended(left(silent), None)
            rollout = left(outcome)
            scoring = True
            return ended(rollout, await self._scored(episode, rollout) if outcome.trainable else None)
        except PolicyFailure as failure:
            if not scoring:
                error = EnvError(f"environment {episode.task.env}: {failure}")  # before the policy did anything
                return ended(left(broken_by(error)), None, error)
            # the scorer's verdict: what was left behind cannot be scored
            return ended(left(MALFORMED), Score(reward=self.config.policy_failure_reward, success=False))
        except InfraError as error:
            return ended(left(broken_by(error)), None, error)
        finally:
            self.close_failures.extend(await episode.close())
            self.abandoned += episode.env.abandoned
            self._stalls.reset()

    async def _take_box(self, episode: RunningEpisode) -> None:
        """Give the episode its box. Waiting for one is not on the policy's clock; waiting until it may start is on no
        clock at all.

        Raises:
            SandboxError: there is none, or not in time.
            TaskError: there are no such boxes.
        """
        spec = self._box_of(episode)
        if spec is None:
            return
        phases = episode.env.phases
        if self._starts is not None:
            with phases.within("box queue"):
                await self._starts.acquire()
        try:
            with phases.within("box"):
                episode.box = await self._boxes.take(spec)
        except BadInput as error:
            raise TaskError(str(error)) from error
        finally:
            if self._starts is not None:
                self._starts.release()

    def _box_of(self, episode: RunningEpisode) -> BoxSpec | None:
        """Return the box that an episode needs: its task's; of a harness that runs a program, one with room for it."""
        if self._widens is None:
            return episode.task.box
        return self._widens(episode.task, tools=bool(episode.env.tools))

    async def _play(self, episode: RunningEpisode) -> Outcome:
        """Let the harness run; return how it ended when nothing broke.

        Raises:
            InfraError: something broke. Of a limit that struck, or of a request that was not answered to the end, it
                is the error, whatever the harness made of it.
        """
        phases = episode.env.phases
        try:
            outcome = await self._held(episode)
        except HarnessError as error:  # a client raises what it was answered with
            raise phases.struck or episode.failure or error from None
        except InfraError as error:
            raise phases.struck or error from None
        failure = phases.struck or episode.failure
        if failure is not None:
            raise failure
        return outcome

    async def _held(self, episode: RunningEpisode) -> Outcome:
        """Let the harness run."""
        try:
            with episode.env.phases.within("harness"), boundary(HarnessError, "harness"):
                await InlineExecutor().run(self._harness.run, episode)
        except LimitReached as limit:
            episode.ended_by = limit
            return outcome_at(limit)
        except HarnessError as error:
            if episode.limit is None:
                raise
            if not is_about(error, episode.limit):
                episode.note("harness", {"error": str(error)})
            return outcome_at(episode.limit)
        except PolicyFailure as failure:
            episode.ended_by = failure
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
