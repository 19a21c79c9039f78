"""Scheduler: makes scored groups of tasks. Rollouts run concurrently and finish in any order; groups are yielded in
admission order (law 5)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sparring.errors import InfraError, SparringError
from sparring.observe.metrics import Metrics
from sparring.protocols import Scorer, TaskSource
from sparring.rollout.breaker import EmptySteps
from sparring.rollout.feed import TaskFeed
from sparring.rollout.group_log import Admission, GroupLog
from sparring.rollout.group_scoring import GroupScoring
from sparring.rollout.metrics import Warnings, admitted_metrics, measure
from sparring.rollout.outcomes import failure_of, unscored
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.seeds import rollout_seed
from sparring.rollout.stalls import Straggler
from sparring.rollout.step_estimates import AdmittedRollouts
from sparring.rollout.window import Window
from sparring.types import Group, Outcome, Purpose, Rollout, Score, Task

T = TypeVar("T")

TRAIN: Purpose = "train"
BASELINE: Purpose = "baseline"


class Scheduler:
    """Source of scored groups, in admission order.

    Args:
        window: limit on how far rollouts run ahead of the trainer.
        engine_version: returns the version that the engine serves.
        scorers: scorers of whole groups, in order.
        log: log of admissions, outcomes and groups. A resume yields the recorded groups and finishes the unfinished
            ones. Every id begins with the log's stage.
        baseline: runner of one more rollout of each task, with the purpose "baseline"; None: no baseline rollout. The
            score goes to `Group.baselines`; without a score the rollout goes to `Group.failed`.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        source: TaskSource,
        window: Window,
        *,
        run_seed: int,
        engine_version: Callable[[], int],
        scorers: Sequence[Scorer] = (),
        baseline: RolloutRunner | None = None,
        log: GroupLog = GroupLog(),
    ) -> None:
        self._runner = runner
        self._source = TaskFeed(source, runner.report)
        self._end_index: int | None = None
        self._straggler = Straggler(runner.waits.spans)
        self._empty_steps = EmptySteps(window.groups_per_step, runner.report)
        self._window = window
        self._run_seed = run_seed
        self._engine_version = engine_version
        self._scoring = GroupScoring(scorers, runner)
        self._baseline = baseline
        self._log = log
        if baseline is not None:
            baseline.breakers = runner.breakers
            baseline.waits.spans = runner.waits.spans
        self.places = runner.places
        self._pending: asyncio.Queue[asyncio.Future[Group] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._states: dict[int, dict[str, Any]] = {}
        self._observed = 0
        self._yielded = 0
        self._resuming = True  # while the log has admissions of an earlier process
        self._trained_steps = 0
        self._dead: asyncio.Future[None] | None = None
        self._metrics = Metrics()
        self._warnings = Warnings(runner.report)
        self._admitted = AdmittedRollouts()

    async def groups(self) -> AsyncIterator[Group]:
        """Yield every group, in admission order, until the source or the window ends.

        A rollout that left its group for a failure of the infrastructure is in `Group.failed`. A group is yielded even
        if no rollout is left in it.

        Raises:
            Exception: error of a background task, raised as soon as the task ends.
        """
        self._dead = asyncio.get_running_loop().create_future()
        self._spawn(self._admit())
        try:
            while (pending := await self._next_pending()) is not None:
                self._straggler.await_group(self._yielded)
                try:
                    group = await self._unless_dead(pending)
                finally:
                    self._straggler.await_group(None)
                self._yielded = group.index + 1
                if not self._resuming and group.index >= self._observed:  # else its admission shows it
                    self._observe_to(group.index)
                    self._observe(group)
                measure(self._metrics, group, lag=self._lag(group), max_context=self._runner.max_context)
                self._metrics.add("rollout/places", self.places.limit, "min")
                self._admitted.add(group)
                self._empty_steps.add(group)
                yield group
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel all running rollouts and wait until their worlds and boxes are closed. Safe to call twice."""
        self._source.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._dead is not None and self._dead.done():
            self._dead.exception()  # retrieves it, so that asyncio does not warn

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the groups that were yielded since the last call."""
        admitted, self._admitted = self._admitted, AdmittedRollouts()
        if self._source.left_out:
            self._metrics.add("rollout/tasks_left_out", self._source.left_out, "sum")
            self._source.left_out = 0
        counts = {**self._metrics.take(), **self._runner.metrics(), **self._runner.breakers.metrics.take()}
        self._warnings.look(counts)
        return {**counts, **admitted_metrics(admitted)}

    def state(self, step: int) -> dict[str, Any]:
        """Return the state that a resume after `step` steps needs: the state before the first group of the next step
        was admitted. Raises ValueError if `step` is not the last released step, so its state is unknown."""
        first = step * self._window.groups_per_step
        if first == self._window.next_index or self._end_index is not None and first > self._end_index:
            return self._snapshot(first)
        if first not in self._states:
            raise ValueError(f"no state of step {step}: {self._window.released_steps} steps are released")
        return dict(self._states[first])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state: the groups after it are admitted again, and recorded groups are read from the log."""
        self._window.resume(state["step"])
        self._source.restore(state["source"])
        self._observed = state["observed"]
        self._yielded = state["first_group"]

    def resume(self, trained_steps: int) -> None:
        """Yield the recorded groups of the steps up to `trained_steps` before new rollouts start."""
        self._trained_steps = trained_steps

    def _snapshot(self, first_group: int) -> dict[str, Any]:
        return {
            "step": first_group // self._window.groups_per_step,
            "first_group": first_group if self._end_index is None else min(first_group, self._end_index),
            "observed": self._observed,
            "source": copy.deepcopy(dict(self._source.state())),
        }

    def _lag(self, group: Group) -> int:
        """Return the lag of a group in optimiser steps when it is trained. Step n trains version n - 1."""
        lag = group.index // self._window.groups_per_step - group.version
        if lag > self._window.max_lag:
            raise SparringError(
                f"{group.id}: expected a lag of at most {self._window.max_lag}, got {lag}; release a step only "
                "after the engine serves its weights"
            )
        return lag

    async def _admit(self) -> None:
        """Start groups in order, as the window and the concurrency limit allow."""
        while True:
            admission = self._admission(self._window.next_index)
            if admission is None:
                await self._window.reached(self._trained_steps)
                await self.places.acquire()  # of the first rollout, which starts on the group's version
            index = await self._window.acquire()
            if index is None:
                break
            self._observe_to(self._yielded if admission is None else admission.observed)
            if index % self._window.groups_per_step == 0:
                released = self._window.released_steps * self._window.groups_per_step
                self._states = {i: state for i, state in self._states.items() if i >= released}
                self._states[index] = self._snapshot(index)
            observed = self._observed  # before the source gives the task
            task = await self._source.next()
            if admission is not None:
                await self._resume_group(index, admission, task)
            elif task is None:
                self._end(index)
                break
            else:
                await self._begin(index, task, observed)
        self._pending.put_nowait(None)

    def _end(self, index: int) -> None:
        """Record and report that the source ended before group `index`; the last step may have fewer groups."""
        self._end_index = index
        steps, groups = divmod(index, self._window.groups_per_step)
        smaller = f", the last of them of {groups} of {self._window.groups_per_step}" if groups else ""
        self._runner.report(f"the tasks end after {index} groups: {steps + bool(groups)} steps{smaller}")

    async def _begin(self, index: int, task: Task, observed: int) -> None:
        """Start a new group; its first rollout already has a place."""
        version = self._engine_version()
        self._log.admit(index, task, version=version, observed=observed)
        rollouts: list[asyncio.Future[Finished]] = []
        self._straggler.begin(index, len(self._places()))
        for place in self._places():
            if rollouts:
                await self.places.acquire()
            rollouts.append(self._spawn(self._rollout(task, index, place)))
        self._pending.put_nowait(self._spawn(self._group(task, index, version, rollouts)))

    async def _resume_group(self, index: int, admission: Admission, task: Task | None) -> None:
        """Admit a group that an earlier process admitted. A recorded group is yielded without changes; of an unfinished
        group, the unfinished rollouts are started. Raises BadInput if the source gave another task."""
        task = self._log.check(index, admission, task)
        group = self._log.group(index)
        if group is not None:
            self._pending.put_nowait(_future_of(group))
            return
        await self._window.reached(self._trained_steps)
        rollouts: list[asyncio.Future[Finished]] = []
        for place in self._places():
            finished = self._log.finished(self._log.rollout_id(index, place), task)
            if finished is not None:
                rollouts.append(_future_of(finished))
                continue
            await self.places.acquire()
            self._runner.log.expect(self._log.rollout_id(index, place))
            if place is None or not self._runner.log.durable:
                self._log.restart(self._log.rollout_id(index, place), "the process that ran it was stopped")
            self._straggler.begin(index, 1)
            rollouts.append(self._spawn(self._rollout(task, index, place)))
        self._pending.put_nowait(self._spawn(self._group(task, index, admission.version, rollouts)))

    def _admission(self, index: int) -> Admission | None:
        """Return the recorded admission of the next group, or None if this group and all later ones are new."""
        admission = self._log.admission(index) if self._resuming else None
        self._resuming = admission is not None
        return admission

    def _observe(self, group: Group) -> None:
        self._source.observe(group)
        self._observed = group.index + 1

    def _observe_to(self, count: int) -> None:
        """Show the source the recorded groups before group `count`."""
        while self._observed < count:
            group = self._log.group(self._observed)
            if group is None:
                raise SparringError(
                    f"group {self._log.group_id(self._observed)}: expected it among the recorded groups, got none; "
                    "restore the run's store from a copy, or start a new run folder"
                )
            self._observe(group)

    def _places(self) -> list[int | None]:
        """Return the places of a group's rollouts; None is the place of the baseline."""
        return [*range(self._runner.config.group_size), *([None] if self._baseline is not None else [])]

    async def _rollout(self, task: Task, index: int, place: int | None) -> Finished:
        """Run the rollout of one place and record its outcome. Place None is the baseline, which is not recorded by
        turns."""
        runner, purpose = (
            (self._runner, TRAIN) if place is not None or self._baseline is None else (self._baseline, BASELINE)
        )
        rollout_id = self._log.rollout_id(index, place)
        try:
            finished = await runner.run(
                task,
                rollout_id=rollout_id,
                index=self._runner.config.group_size if place is None else place,
                seed=self._seed(purpose, task, index, place or 0),
                purpose=purpose,
                admission=index,
            )
            await self._log.finish(rollout_id, task, finished, by_turns=purpose == TRAIN)
            return finished
        finally:
            self.places.release()
            self._straggler.end(index)

    def _seed(self, purpose: Purpose, task: Task, index: int, place: int) -> int:
        return rollout_seed(self._run_seed, purpose, task, place, self._log.group_id(index))

    async def _group(self, task: Task, index: int, version: int, rollouts: Sequence[asyncio.Future[Finished]]) -> Group:
        group = await self._score_group(task, index, version, await asyncio.gather(*rollouts))
        await self._log.append(group)
        compact(group)
        return group

    async def _score_group(self, task: Task, index: int, version: int, finished: Sequence[Finished]) -> Group:
        kept = [(f.rollout, f.score) for f in finished if f.score is not None]
        scores: Sequence[Score] = [score for _, score in kept]
        failed = [r for f in finished for r in (*f.broken, *([f.rollout] if f.score is None else []))]
        if kept:
            try:
                scores = await self._scoring.scores(task, [rollout for rollout, _ in kept], scores)
            except InfraError as error:
                outcome = Outcome(kind="judge_failed", reason="failure", failure=failure_of(error))
                failed += [unscored(rollout, outcome) for rollout, _ in kept]
                kept, scores = [], []
        usable: list[tuple[Rollout, Score]] = []
        baselines: list[Score] = []
        for (rollout, _), score in zip(kept, scores, strict=True):
            if score.reward is None:
                failed.append(unscored(rollout))
            elif rollout.purpose == BASELINE:
                baselines.append(score)
            else:
                usable.append((rollout, score))
        return Group(
            id=self._log.group_id(index),
            index=index,
            task=task,
            rollouts=tuple(r for r, _ in usable),
            scores=tuple(s for _, s in usable),
            failed=tuple(failed),
            version=version,
            baselines=tuple(baselines),
        )

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_end)
        return task

    def _handle_task_end(self, task: asyncio.Task[Any]) -> None:
        """Handle the end of a background task. Its error ends the run."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._dead is not None and not self._dead.done():
            self._dead.set_exception(error)

    async def _next_pending(self) -> asyncio.Future[Group] | None:
        """Return the next admitted group, finished or not, or None after the last."""
        return await self._unless_dead(self._pending.get()) if self._pending.empty() else self._pending.get_nowait()

    async def _unless_dead(self, wanted: Awaitable[T]) -> T:
        """Await `wanted`, or raise the error of a background task."""
        assert self._dead is not None
        if isinstance(wanted, asyncio.Future) and wanted.done() and not self._dead.done():
            given: T = wanted.result()
            return given
        waiting = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait((waiting, self._dead), return_when=asyncio.FIRST_COMPLETED)
            return self._dead.result() if self._dead.done() else waiting.result()  # type: ignore[return-value]
        finally:
            waiting.cancel()


def _future_of(result: T) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


def compact(group: Group) -> None:
    """Reduce the memory of a group that waits for its step."""
    for rollout in (*group.rollouts, *group.failed):
        for trajectory in rollout.trajectories:
            for segment in trajectory.segments:
                segment.compact()
