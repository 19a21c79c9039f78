"""Durable log of a stage's groups: which were admitted, finished, trained and published. A resumed run reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from sparring.errors import SparringError, refusal
from sparring.log import LogEntry, LogKind, step_name
from sparring.protocols import Store
from sparring.record.order import settled
from sparring.record.turns import TurnQueue
from sparring.rollout.runner import Finished
from sparring.rollout.seeds import digest
from sparring.store.codec import StoredRollout, decode, encode
from sparring.types import Group, Rollout, Score, Task


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Admission of a group. `observed` is the number of groups shown to the task source before it gave the task. This
    number and the source's state decide which tasks the source gives."""

    task: str
    digest: str
    version: int
    observed: int


class StoredFinished(msgspec.Struct, frozen=True, kw_only=True):
    """Finished rollout whose segments are in the store's table of turns. `segments` counts them by trajectory. A
    baseline rollout is not recorded by turns: it holds its segments itself and counts none."""

    rollout: StoredRollout
    score: Score | None
    broken: tuple[StoredRollout, ...]
    segments: dict[str, int]


class GroupLog:
    """Log of the groups of one stage, written during a run and read by a resume.

    Entries, by kind: `admitted` holds an `Admission`; `outcome` a `StoredFinished` in bytes; `trained` the ids of the
    groups of a step, in order; `restarted` a reason.

    Args:
        store: store of the log; None records nothing.
        stage: stage of the groups, which begins every id: group 12 of stage rl is `rl/12`, its rollout 3 is `rl/12/3`.
        files: task files by `Task.env`, under the empty name if all tasks come from one file. An error about a changed
            task names them.
    """

    def __init__(
        self, store: Store | None = None, stage: str = "rl", files: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._store = store
        self.stage = stage
        self._files = files
        self._queue = None if store is None else TurnQueue(store)
        self._appending = asyncio.Lock()

    def group_id(self, index: int) -> str:
        """Return the id of group `index`."""
        return f"{self.stage}/{index}"

    def rollout_id(self, index: int, place: int | None) -> str:
        """Return the id of a rollout of group `index` by its place in the group; None is the place of the baseline."""
        return f"{self.stage}/{index}/{'baseline' if place is None else place}"

    def admit(self, index: int, task: Task, *, version: int, observed: int) -> None:
        """Record the admission of group `index`."""
        if self._store is None:
            return
        admission = Admission(task=task.id, digest=digest(task), version=version, observed=observed)
        self._store.record(self._entry("admitted", self.group_id(index), msgspec.to_builtins(admission)))

    def admission(self, index: int) -> Admission | None:
        """Return the recorded admission of group `index`, or None if it is not recorded."""
        if self._store is None:
            return None
        data = self._last(self.group_id(index), "admitted")
        return None if data is None else msgspec.convert(data, Admission)

    def check(self, index: int, admission: Admission, task: Task | None) -> Task:
        """Return the task of group `index` if it equals the recorded task. Raises BadInput if the source gave another
        task, because its data has changed."""
        if task is not None and digest(task) == admission.digest:
            return task
        given = "the end of the tasks" if task is None else f"task {task.id}"
        files = [file for env, file in self._files.items() if task is None or env in ("", task.env)]
        contents = f"{' and '.join(files)} what they held" if len(files) > 1 else f"{''.join(files)} what it held"
        raise refusal(
            f"group {self.group_id(index)}",
            f"task {admission.task} as it was when the group began",
            f"{given} with other contents" if task is not None and task.id == admission.task else given,
            f"give {contents if files else '[env] the data of'} when this run was begun, or start a new run folder",
        )

    async def finish(self, rollout_id: str, task: Task, finished: Finished, *, by_turns: bool = True) -> None:
        """Record the outcome of a rollout before its group is scored.

        Args:
            rollout_id: id of the rollout's first attempt.
            by_turns: whether the store has the rollout's turns.
        """
        if self._queue is None:
            return
        rollouts = (finished.rollout, *finished.broken)
        trajectories = [trajectory for rollout in rollouts for trajectory in rollout.trajectories]
        stored = [StoredRollout.of(_without_segments(each) if by_turns else each, task) for each in rollouts]
        outcome = StoredFinished(
            rollout=stored[0],
            score=finished.score,
            broken=tuple(stored[1:]),
            segments={trajectory.id: len(trajectory.segments) for trajectory in trajectories} if by_turns else {},
        )
        await self._queue.record(self._entry("outcome", rollout_id, {"finished": encode(outcome)}))

    def finished(self, rollout_id: str, task: Task) -> Finished | None:
        """Return a rollout that an earlier process finished, or None if it did not finish. `rollout_id`: id of the
        rollout's first attempt."""
        data = self._last(rollout_id, "outcome")
        if data is None:
            return None
        stored = decode(data["finished"], StoredFinished)
        rollouts = [each.rollout(task) for each in (stored.rollout, *stored.broken)]
        if stored.segments:
            rollouts = [self._with_segments(rollout) for rollout in rollouts]
        for trajectory in (trajectory for rollout in rollouts for trajectory in rollout.trajectories):
            if len(trajectory.segments) != stored.segments.get(trajectory.id, len(trajectory.segments)):
                return None  # some of its turns are missing
        return Finished(rollout=rollouts[0], score=stored.score, broken=tuple(rollouts[1:]))

    def restart(self, rollout_id: str, reason: str) -> None:
        """Drop the recorded turns of an unfinished rollout, which will start over."""
        if self._store is not None and self._store.forget(rollout_id):
            self._store.record(self._entry("restarted", rollout_id, {"reason": reason}))

    async def append(self, group: Group) -> None:
        """Record a scored group. If several groups finish together, other coroutines run between their commits, because
        a commit takes longer the more tokens its group has."""
        if self._store is None:
            return
        async with self._appending:
            self._store.append(group, stage=self.stage)
            await asyncio.sleep(0)

    def group(self, index: int) -> Group | None:
        """Return a recorded group, or None if it is not recorded."""
        groups = () if self._store is None else self._store.groups(stage=self.stage, first=index, end=index + 1)
        return next(iter(groups), None)

    def train(self, step: int, groups: Sequence[str]) -> None:
        """Record the groups of a step, in order, or compare them with the recorded ones if the step is trained again.
        Raises SparringError if the recorded step has other groups."""
        name = step_name(self.stage, step)
        recorded = self._last(name, "trained")
        if self._store is None:
            return
        if recorded is None:
            self._store.record(self._entry("trained", name, {"groups": list(groups)}))
        elif recorded["groups"] != list(groups):
            raise SparringError(
                f"{name}: expected the recorded groups {', '.join(recorded['groups'])}, got {', '.join(groups)}; "
                "report this as a defect of Sparring"
            )

    def last_published(self, after: int) -> int:
        """Return the last of the consecutive steps after `after` that published weights; `after` itself if the step
        after it did not publish."""
        step = after
        while self._last(step_name(self.stage, step + 1), "published") is not None:
            step += 1
        return step

    def _last(self, name: str, kind: LogKind) -> dict[str, Any] | None:
        entries = [] if self._store is None else list(self._store.entries(self.stage, name=name, kinds=(kind,)))
        return dict(entries[-1][1].data) if entries else None

    def _entry(self, kind: LogKind, name: str, data: dict[str, Any]) -> LogEntry:
        return LogEntry(stage=self.stage, kind=kind, name=name, data=data)

    def _with_segments(self, rollout: Rollout) -> Rollout:
        assert self._store is not None
        read = self._store.turns
        return replace(
            rollout, trajectories=tuple(replace(t, segments=settled(read(t.id))) for t in rollout.trajectories)
        )


def _without_segments(rollout: Rollout) -> Rollout:
    return replace(rollout, trajectories=tuple(replace(t, segments=()) for t in rollout.trajectories))
