"""Repetition of tasks whose group lost all its rollouts to infrastructure failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from sparring.errors import TaskError
from sparring.protocols import TaskSource
from sparring.types import Group, Task


class LostTasksAgain:
    """Task source that repeats a task when its whole group was lost, up to `most` times. Implements
    `protocols.TaskSource`.

    A lost task waits until another group has finished or the source has ended. Otherwise a task that breaks its
    environment could be the only one that runs. Repetition depends only on the observed groups, so a resumed run
    repeats the same tasks. A repeated group has a new admission index, and so fresh random numbers.
    """

    def __init__(self, source: TaskSource, most: int) -> None:
        self._source, self._most = source, most
        self._lost: deque[Task] = deque()
        self._ready = 0
        self._times: dict[str, int] = {}

    def next(self) -> Task | None:
        task = None if self._ready else self._source.next()
        if task is None and self._lost:
            self._ready = max(0, self._ready - 1)
            return self._lost.popleft()
        return task

    def observe(self, group: Group) -> None:
        self._source.observe(group)
        id = group.task.id
        if group.rollouts or not group.failed:
            self._times.pop(id, None)
            self._ready = len(self._lost) if group.rollouts else self._ready
            return
        if all(rollout.outcome.trainable for rollout in group.failed):
            return  # no failure of the infrastructure: the task's first prompt is too long, and would be too long again
        failures = [rollout.outcome.failure for rollout in group.failed]
        if any(failure is not None and failure.error == TaskError.__name__ for failure in failures):
            return  # this task can never be rolled out
        if self._times.get(id, 0) < self._most:
            self._times[id] = self._times.get(id, 0) + 1
            self._lost.append(group.task)
        else:
            self._times.pop(id, None)

    def state(self) -> Mapping[str, Any]:
        lost = [msgspec.to_builtins(task) for task in self._lost]
        return {"lost": lost, "ready": self._ready, "times": dict(self._times), "source": dict(self._source.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._lost = deque(msgspec.convert(task, Task) for task in state["lost"])
        self._ready, self._times = int(state["ready"]), dict(state["times"])
        self._source.restore(state["source"])
