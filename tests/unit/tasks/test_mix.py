"""Mixtures of task sources."""

from __future__ import annotations

import pytest

from sparring.errors import BadInput
from sparring.tasks.files import FileTasks
from sparring.tasks.mix import Mix
from sparring.types import Group, Task


def finite(name: str, count: int) -> FileTasks:
    return FileTasks([{"id": str(i), "prompt": f"{name} {i}"} for i in range(count)], env=name)


def endless(name: str) -> FileTasks:
    return FileTasks([{"id": str(i), "prompt": f"{name} {i}"} for i in range(10)], env=name, seed=0)


def drain(mix: Mix, count: int = 10**6) -> list[Task]:
    return [task for _, task in zip(range(count), iter(mix.next, None), strict=False)]


def test_shares_follow_the_weights() -> None:
    drawn = [t.env for t in drain(Mix([endless("a"), endless("b"), endless("c")], [6, 3, 0], seed=1), 3000)]
    assert abs(drawn.count("a") / 3000 - 2 / 3) < 0.03
    assert drawn.count("c") == 0


def test_the_seed_decides() -> None:
    def names(seed: int) -> list[str]:
        return [t.env for t in drain(Mix([endless("a"), endless("b")], [1, 1], seed=seed), 64)]

    assert names(1) == names(1) != names(2)


def test_every_task_of_finite_sources_comes_once() -> None:
    drawn = drain(Mix([finite("a", 5), finite("b", 40)], [10, 1], seed=2))
    assert sorted(t.id for t in drawn) == sorted([f"a/{i}" for i in range(5)] + [f"b/{i}" for i in range(40)])


class Watched(FileTasks):
    """Remembers what it was told."""

    def __init__(self, name: str) -> None:
        super().__init__([{"id": "0", "prompt": name}], env=name)
        self.seen: list[str] = []

    def observe(self, group: Group) -> None:
        self.seen.append(group.task.id)


def test_a_group_is_observed_by_its_own_source_also_after_a_resume() -> None:
    first = Mix([Watched("a"), Watched("b")], [1, 1], seed=0)
    tasks = drain(first)
    sources = [Watched("a"), Watched("b")]
    resumed = Mix(sources, [1, 1], seed=0)
    resumed.restore(first.state())
    for task in tasks:
        resumed.observe(Group(id=task.id, index=0, task=task, rollouts=(), scores=()))
    assert [source.seen for source in sources] == [["a/0"], ["b/0"]]
    assert resumed.state()["origins"] == {}


def test_each_group_of_a_task_that_is_in_flight_twice_is_observed() -> None:
    """Two sources have a task of one name, and the mixture is stopped while both are in flight."""
    sources = [Watched("a"), Watched("a")]
    mix = Mix(sources, [1, 1], seed=0)
    tasks = drain(mix)
    assert [task.id for task in tasks] == ["a/0", "a/0"]
    resumed = Mix(sources, [1, 1], seed=0)
    resumed.restore(mix.state())
    for index, task in enumerate(tasks):
        resumed.observe(Group(id=f"rl/{index}", index=index, task=task, rollouts=(), scores=()))
    assert [source.seen for source in sources] == [["a/0"], ["a/0"]]
    assert resumed.state()["origins"] == {}


def test_a_state_of_an_earlier_form_is_gone_on_from() -> None:
    sources = [Watched("a"), Watched("b")]
    mix = Mix(sources, [1, 1], seed=0)
    tasks = drain(mix)
    state = {**mix.state(), "origin": {"a/0": 0, "b/0": 1}}
    del state["origins"]
    mix.restore(state)
    for task in tasks:
        mix.observe(Group(id=task.id, index=0, task=task, rollouts=(), scores=()))
    assert [source.seen for source in sources] == [["a/0"], ["b/0"]]


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    with pytest.raises(BadInput, match="mix: expected 2 weights of 0 or more, one above 0"):
        Mix([finite("a", 1), finite("b", 1)], weights, seed=0)


def test_the_state_of_another_mixture_is_refused() -> None:
    state = Mix([finite("a", 1)], [1], seed=0).state()
    with pytest.raises(BadInput, match="mix: expected the state of 2 sources, got one of 1"):
        Mix([finite("a", 1), finite("b", 1)], [1, 1], seed=0).restore(state)
