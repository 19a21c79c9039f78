"""Difficulty pools over a source of tasks."""

from __future__ import annotations

import json

import pytest

from sparring.envs.splits import Stream, listed
from sparring.tasks.pools import MOST_PASSED_OVER, DifficultyPools, Pools
from sparring.types import Group, Message, Outcome, Rollout, Score, Task, Trajectory

DONE = Outcome(kind="completed", reason="answered")


def task_of(number: int) -> Task:
    return Task(id=f"a/{number}", env="a", messages=(Message(role="user", content=f"task {number}"),))


def endless(count: int = 10) -> Stream:
    return Stream(lambda place: task_of(place % count))


def tried(task: Task, rewards: list[float]) -> Group:
    def rollout(index: int) -> Rollout:
        trajectory = Trajectory(id=str(index), task=task.id, role="policy", segments=(), outcome=DONE)
        return Rollout(id=str(index), task=task, index=index, attempt=0, purpose="train", trajectories=(trajectory,))

    scores = tuple(Score(reward=reward) for reward in rewards)
    return Group(id="g", index=0, task=task, rollouts=tuple(map(rollout, range(len(rewards)))), scores=scores)


def shares(pools: Pools, count: int) -> dict[str, float]:
    drawn = [task.id for _, task in zip(range(count), iter(pools.next, None), strict=False)]
    return {id: drawn.count(id) / count for id in sorted(set(drawn))}


def test_easy_and_hard_tasks_come_less_often() -> None:
    pools = DifficultyPools(keep_easy=0.25, keep_hard=0.5).open(endless(), seed=3)
    tasks = {task.id: task for task in (pools.next() for _ in range(10)) if task is not None}
    easy, hard, half, lost = sorted(tasks)[:4]
    for id, rewards in ((easy, [1.0, 1.0]), (hard, [0.0, 0.0]), (half, [1.0, 0.0]), (lost, [])):
        pools.observe(tried(tasks[id], rewards))
    drawn = shares(pools, 4000)
    usual = drawn[half]
    assert drawn[lost] == pytest.approx(usual, rel=0.02)
    assert drawn[easy] / usual == pytest.approx(0.25, abs=0.05)
    assert drawn[hard] / usual == pytest.approx(0.5, abs=0.07)


def test_a_task_leaves_its_pool_when_its_next_group_is_another() -> None:
    pools = DifficultyPools(keep_easy=0.0).open(endless(2), seed=0)
    first, second = pools.next(), pools.next()
    assert first is not None and second is not None
    pools.observe(tried(first, [1.0]))
    assert set(shares(pools, 50)) == {second.id}
    pools.observe(tried(first, [1.0, 0.0]))
    assert set(shares(pools, 50)) == {first.id, second.id}


def test_a_source_of_nothing_but_easy_tasks_does_not_hang() -> None:
    pools = DifficultyPools(keep_easy=0.0).open(endless(1), seed=0)
    only = pools.next()
    assert only is not None
    pools.observe(tried(only, [1.0]))
    assert pools.next() is not None
    assert pools.state()["given"] == 1 + MOST_PASSED_OVER


def test_a_finite_source_ends() -> None:
    pools = DifficultyPools().open(listed([task_of(0)]), seed=0)
    assert pools.next() is not None and pools.next() is None


def test_a_resumed_source_goes_on_with_the_same_tasks() -> None:
    first = DifficultyPools(keep_easy=0.5).open(endless(), seed=1)
    for task in [first.next() for _ in range(10)]:
        assert task is not None
        first.observe(tried(task, [float(int(task.id.rpartition("/")[2]) % 2)]))
    second = DifficultyPools(keep_easy=0.5).open(endless(), seed=1)
    second.restore(json.loads(json.dumps(first.state())))
    assert [first.next() for _ in range(30)] == [second.next() for _ in range(30)]


def test_invalid_settings_of_pools_are_refused() -> None:
    for wrong in ({"keep_easy": 2.0}, {"easy_from": 0.5, "hard_to": 0.5}, {"hard_to": -1.0}):
        with pytest.raises(ValueError):
            DifficultyPools(**wrong)
