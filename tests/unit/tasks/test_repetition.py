"""Tasks whose whole group was lost."""

from __future__ import annotations

import json

import pytest

from sparring.tasks.repetition import LostTasksAgain
from sparring.testing.toy import ToyTasks
from sparring.types import Failure, Group, Outcome, Rollout, Score, Task, Trajectory


def group(task: Task, *, lost: bool, error: str = "SandboxError") -> Group:
    failure = Failure(error=error, where="", message="gone")
    ended = (
        Outcome(kind="infra_failed", reason="failure", failure=failure)
        if lost
        else Outcome(kind="completed", reason="answered")
    )
    trajectory = Trajectory(id="t", task=task.id, role="policy", segments=(), outcome=ended)
    rollout = Rollout(id="r", task=task, index=0, attempt=0, purpose="train", trajectories=(trajectory,))
    kept, failed = ((), (rollout,)) if lost else ((rollout,), ())
    return Group(
        id="g", index=0, task=task, rollouts=kept, scores=tuple(Score(reward=1.0) for _ in kept), failed=failed
    )


def ids(source: LostTasksAgain, count: int) -> list[str]:
    return [task.id for _ in range(count) if (task := source.next()) is not None]


def test_a_lost_task_is_repeated_after_another_group_finished() -> None:
    source = LostTasksAgain(ToyTasks("train", None), 2)
    first, second = source.next(), source.next()
    assert first and second
    source.observe(group(first, lost=True))
    assert ids(source, 1) == ["train-2"]
    source.observe(group(second, lost=False))
    assert ids(source, 3) == ["train-0", "train-3", "train-4"]


def test_a_lost_task_is_repeated_a_limited_number_of_times() -> None:
    source = LostTasksAgain(ToyTasks("train", 1), 2)
    comes = 0
    while (task := source.next()) is not None:
        comes += 1
        source.observe(group(task, lost=True))
    assert comes == 3


def test_a_task_that_can_never_be_rolled_out_is_not_repeated() -> None:
    source = LostTasksAgain(ToyTasks("train", 1), 2)
    task = source.next()
    assert task
    source.observe(group(task, lost=True, error="TaskError"))
    assert source.next() is None


@pytest.mark.parametrize("ready", [False, True])
def test_a_resume_gives_the_same_tasks(ready: bool) -> None:
    source = LostTasksAgain(ToyTasks("train", 5), 2)
    first, second = source.next(), source.next()
    assert first and second
    source.observe(group(first, lost=True))
    if ready:
        source.observe(group(second, lost=False))
    resumed = LostTasksAgain(ToyTasks("train", 5), 2)
    resumed.restore(json.loads(json.dumps(source.state())))
    tasks = [source.next() for _ in range(6)]
    assert tasks == [resumed.next() for _ in range(6)] and first in tasks
