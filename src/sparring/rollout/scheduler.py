"""Tasks become scored groups: rollouts run side by side and finish in any order, groups leave in admission order (law
5)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sparring.errors import InfraError, SparringError
from sparring.observe.metrics import Metrics
from sparring.protocols import Scorer, TaskSource
from sparring.rollout.admitted import AdmittedRollouts
from sparring.rollout.breaker import EmptySteps
from sparring.rollout.feed import TaskFeed
from sparring.rollout.group_log import Admission, GroupLog
from sparring.rollout.group_scoring import GroupScoring
from sparring.rollout.metrics import Warnings, admitted_metrics, measure
from sparring.rollout.outcomes import failure_of, unscored
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.seeds import rollout_seed
from sparring.rollout.stalls import Straggler
from sparring.rollout.window import Window
from sparring.types import Group, Outcome, Purpose, Rollout, Score, Task

T = TypeVar("T")

TRAIN: Purpose = "train"
BASELINE: Purpose = "baseline"


class Scheduler:
    """Source of scored groups, in the order of their admission.

    Args:
        runner: runs one rollout.
        source: where tasks come from.
        window: how far ahead of the trainer groups may start.
        run_seed: everything sampled derives from it.
        engine_version: the version that the engine serves now.
        scorers: further passes over whole groups, in this order.
        log: where admissions, outcomes and groups are recorded, and read again where an earlier process began them:
            recorded groups are yielded as they are, unfinished ones are finished. Its stage is the first part of every
            id.
        baseline: runs one rollout more of every task, with the purpose "baseline"; its score is in `Group.baselines`,
            or the rollout in `Group.failed`.

    Attributes:
        places: of the rollouts in flight; those of the runner.
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
        self._repeats = True  # as long as the log has admissions of an earlier process
        self._trained_steps = 0
        self._fresh = True
        self._dead: asyncio.Future[None] | None = None
        self._metrics = Metrics()
        self._warnings = Warnings(runner.report)
        self._admitted = AdmittedRollouts()

    async def groups(self) -> AsyncIterator[Group]:
        """Yield every group, in admission order, until the source or the window ends.

        A rollout that left its group for an infrastructure failure is in `Group.failed`; a group is yielded whatever is
        left of it.

        Raises:
            Exception: whatever killed a background task, as soon as it is dead: the run cannot go on without it.
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
                if not self._repeats and group.index >= self._observed:  # else a recorded admission has it shown
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
        """Stop everything that is in flight and wait until worlds and boxes are closed. Safe to call twice."""
        self._source.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._dead is not None and self._dead.done():
            self._dead.exception()  # it has been raised, or nobody listens any more

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the groups yielded since the last call."""
        admitted, self._admitted = self._admitted, AdmittedRollouts()
        if self._source.left_out:
            self._metrics.add("rollout/tasks_left_out", self._source.left_out, "sum")
            self._source.left_out = 0
        counts = {**self._metrics.take(), **self._runner.metrics(), **self._runner.breakers.metrics.take()}
        self._warnings.look(counts)
        return {**counts, **admitted_metrics(admitted)}

    def state(self, step: int) -> dict[str, Any]:
        """Return what a resume after `step` steps needs.

        That is the state before the first group of the next step was admitted.

        Args:
            step: the last released one.

        Raises:
            ValueError: its state is not known, because it is not the last released step.
        """
        first = step * self._window.groups_per_step
        if first == self._window.next_index or self._end_index is not None and first > self._end_index:
            return self._snapshot(first)
        if first not in self._states:
            raise ValueError(f"no state of step {step}: {self._window.released_steps} steps are released")
        return dict(self._states[first])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the groups after it are admitted again, those of the log from the log.

        A state that does not say `fresh_seeds` was written when a task had the same random numbers whenever it came: a
        run that was begun so keeps them, or its second half would not be that of the run uninterrupted.

        Args:
            state: of `state`.
        """
        self._window.resume(state["step"])
        self._source.restore(state["source"])
        self._observed = state["observed"]
        self._yielded = state["first_group"]
        self._fresh = state.get("fresh_seeds", False)

    def resume(self, trained_steps: int) -> None:
        """Train the steps up to `trained_steps` again, from recorded groups, before anything is sampled."""
        self._trained_steps = trained_steps

    def _snapshot(self, first_group: int) -> dict[str, Any]:
        """Return the state before group `first_group` is admitted."""
        return {
            "step": first_group // self._window.groups_per_step,
            "first_group": first_group if self._end_index is None else min(first_group, self._end_index),
            "observed": self._observed,
            "fresh_seeds": self._fresh,
            "source": copy.deepcopy(dict(self._source.state())),
        }

    def _lag(self, group: Group) -> int:
        """Return the steps that a group is behind when it is trained; step n trains on version n - 1."""
        lag = group.index // self._window.groups_per_step - group.version
        if lag > self._window.max_lag:
            raise SparringError(
                f"{group.id}: expected a lag of at most {self._window.max_lag}, got {lag}; release a step only "
                "after the engine serves its weights"
            )
        return lag

    async def _admit(self) -> None:
        """Start groups in order as the window and the places for rollouts allow."""
        while True:
            admission = self._admission(self._window.next_index)
            if admission is None:
                await self._window.reached(self._trained_steps)
                await self.places.acquire()  # the first rollout's, so that the group's version is the one it starts on
            index = await self._window.acquire()
            if index is None:
                break
            self._observe_to(self._yielded if admission is None else admission.observed)
            if index % self._window.groups_per_step == 0:
                released = self._window.released_steps * self._window.groups_per_step
                self._states = {i: state for i, state in self._states.items() if i >= released}
                self._states[index] = self._snapshot(index)
            observed = self._observed  # by the source when it gives the task
            task = await self._source.next()
            if admission is not None:
                await self._repeat(index, admission, task)
            elif task is None:
                self._end(index)
                break
            else:
                await self._begin(index, task, observed)
        self._pending.put_nowait(None)

    def _end(self, index: int) -> None:
        """Take note that the source ended before group `index`: the last step is made of what there is."""
        self._end_index = index
        steps, groups = divmod(index, self._window.groups_per_step)
        smaller = f", the last of them of {groups} of {self._window.groups_per_step}" if groups else ""
        self._runner.report(f"the tasks end after {index} groups: {steps + bool(groups)} steps{smaller}")

    async def _begin(self, index: int, task: Task, observed: int) -> None:
        """Start a new group, for whose first rollout there is a place."""
        version = self._engine_version()
        self._log.admit(index, task, version=version, observed=observed)
        rollouts: list[asyncio.Future[Finished]] = []
        self._straggler.begin(index, len(self._places()))
        for place in self._places():
            if rollouts:
                await self.places.acquire()
            rollouts.append(self._spawn(self._rollout(task, index, place)))
        self._pending.put_nowait(self._spawn(self._group(task, index, version, rollouts)))

    async def _repeat(self, index: int, admission: Admission, task: Task | None) -> None:
        """Admit a group that an earlier process admitted: as it is if it is recorded, else start what is not finished
        of it.

        Raises:
            BadInput: its task is another one.
        """
        task = self._log.check(index, admission, task)
        group = self._log.group(index)
        if group is not None:
            self._pending.put_nowait(_done(group))
            return
        await self._window.reached(self._trained_steps)
        rollouts: list[asyncio.Future[Finished]] = []
        for place in self._places():
            finished = self._log.finished(self._log.rollout_id(index, place), task)
            if finished is not None:
                rollouts.append(_done(finished))
                continue
            await self.places.acquire()
            self._runner.log.expect(self._log.rollout_id(index, place))
            if place is None or not self._runner.log.durable:
                self._log.restart(self._log.rollout_id(index, place), "the process that ran it was stopped")
            self._straggler.begin(index, 1)
            rollouts.append(self._spawn(self._rollout(task, index, place)))
        self._pending.put_nowait(self._spawn(self._group(task, index, admission.version, rollouts)))

    def _admission(self, index: int) -> Admission | None:
        """Return the recorded admission of the next group, None where it is a new one; so are all after that."""
        admission = self._log.admission(index) if self._repeats else None
        self._repeats = admission is not None
        return admission

    def _observe(self, group: Group) -> None:
        """Show the source a group."""
        self._source.observe(group)
        self._observed = group.index + 1

    def _observe_to(self, count: int) -> None:
        """Show the source the recorded groups up to the first `count`."""
        while self._observed < count:
            group = self._log.group(self._observed)
            if group is None:
                raise SparringError(
                    f"group {self._log.group_id(self._observed)}: expected it among the recorded groups, got none; "
                    "restore the run's store from a copy, or start a new run folder"
                )
            self._observe(group)

    def _places(self) -> list[int | None]:
        """Return the places of a group's rollouts; None is the baseline's."""
        return [*range(self._runner.config.group_size), *([None] if self._baseline is not None else [])]

    async def _rollout(self, task: Task, index: int, place: int | None) -> Finished:
        """Run one rollout in its place and record its outcome. In place None, that is the one that the others are
        judged against, which is not recorded turn by turn."""
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
        """Return the seed of the rollout in `place` of group `index`."""
        group = self._log.group_id(index) if self._fresh else None
        return rollout_seed(self._run_seed, purpose, task, place, group)

    async def _group(self, task: Task, index: int, version: int, rollouts: Sequence[asyncio.Future[Finished]]) -> Group:
        """Return the scored and recorded group, when its last rollout is done."""
        group = await self._scored(task, index, version, await asyncio.gather(*rollouts))
        await self._log.append(group)
        compact(group)
        return group

    async def _scored(self, task: Task, index: int, version: int, finished: Sequence[Finished]) -> Group:
        """Return the group of finished rollouts after its second pass."""
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
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Take note that a background task is over. If it died, so does the run."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._dead is not None and not self._dead.done():
            self._dead.set_exception(error)

    async def _next_pending(self) -> asyncio.Future[Group] | None:
        """Return the next admitted group, finished or not; None after the last."""
        return await self._unless_dead(self._pending.get()) if self._pending.empty() else self._pending.get_nowait()

    async def _unless_dead(self, wanted: Awaitable[T]) -> T:
        """Await `wanted`, or raise what killed a background task."""
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


def _done(result: T) -> asyncio.Future[T]:
    """Return a future that has its result."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


def compact(group: Group) -> None:
    """Let a group that waits for its step take less memory."""
    for rollout in (*group.rollouts, *group.failed):
        for trajectory in rollout.trajectories:
            for segment in trajectory.segments:
                segment.compact()
