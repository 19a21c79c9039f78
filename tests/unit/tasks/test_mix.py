"""Mixtures of task sources, at the weights of what is trained."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from random import Random

import pytest
from refusals import refused_at

from sparring.envs.splits import Stream, listed
from sparring.tasks.mix import Mix, trained_part
from sparring.types import Failure, Group, Message, Outcome, Rollout, Score, Task, Trajectory

SIZE, GROUPS, STEPS = 8, 16, 200
ENDED = Outcome(kind="completed", reason="answered")
BROKEN = Outcome(kind="infra_failed", reason="failure", failure=Failure(error="SandboxError", where="", message="gone"))


def task_of(name: str, number: int) -> Task:
    return Task(id=f"{name}/{number}", env=name, messages=(Message(role="user", content=f"{name} {number}"),))


def finite(name: str, count: int) -> Stream:
    return listed([task_of(name, number) for number in range(count)])


def endless(name: str) -> Stream:
    return Stream(lambda place: task_of(name, place % 10))


def mixed(*sources: Stream, weights: list[float], drops_equal: bool = False) -> Mix:
    names = "abc"[: len(sources)]
    return Mix(dict(zip(names, sources, strict=True)), dict(zip(names, weights, strict=True)), drops_equal=drops_equal)


def drain(mix: Mix, count: int = 10**6) -> list[Task]:
    return [task for _, task in zip(range(count), iter(mix.next, None), strict=False)]


def group(task: Task, rewards: list[float], lost: int = 0, index: int = 0) -> Group:
    """A group with these rewards, and so many more rollouts that broke."""

    def rollout(place: int, outcome: Outcome) -> Rollout:
        trajectory = Trajectory(id="t", task=task.id, role="policy", segments=(), outcome=outcome)
        return Rollout(id="r", task=task, index=place, attempt=0, purpose="train", trajectories=(trajectory,))

    return Group(
        id=str(index),
        index=index,
        task=task,
        rollouts=tuple(rollout(place, ENDED) for place in range(len(rewards))),
        scores=tuple(Score(reward=reward) for reward in rewards),
        failed=tuple(rollout(len(rewards) + place, BROKEN) for place in range(lost)),
    )


def test_shares_follow_the_weights() -> None:
    drawn = [t.env for t in drain(mixed(endless("a"), endless("b"), endless("c"), weights=[6, 3, 0]), 3000)]
    assert abs(drawn.count("a") / 3000 - 2 / 3) < 0.001
    assert drawn.count("c") == 0


def test_every_task_of_finite_sources_comes_once() -> None:
    drawn = drain(mixed(finite("a", 5), finite("b", 40), weights=[10, 1]))
    assert sorted(t.id for t in drawn) == sorted([f"a/{i}" for i in range(5)] + [f"b/{i}" for i in range(40)])


class Watched(Stream):
    """Remembers what it was told."""

    def __init__(self, name: str, count: int = 1) -> None:
        super().__init__(lambda place: task_of(name, place) if place < count else None)
        self.seen: list[str] = []

    def observe(self, group: Group) -> None:
        self.seen.append(group.task.id)


def test_a_group_is_observed_by_its_own_source_also_after_a_resume() -> None:
    first = mixed(Watched("a"), Watched("b"), weights=[1, 1])
    tasks = drain(first)
    sources = [Watched("a"), Watched("b")]
    resumed = mixed(*sources, weights=[1, 1])
    resumed.restore(json.loads(json.dumps(first.state())))
    for task in tasks:
        resumed.observe(group(task, [1.0]))
    assert [source.seen for source in sources] == [["a/0"], ["b/0"]]


def test_each_group_of_a_task_that_is_in_flight_twice_is_observed() -> None:
    source = Watched("a")
    mix = mixed(source, Watched("b"), weights=[1, 1])
    task = drain(mix, 1)[0]
    for index in range(2):
        mix.observe(group(task, [1.0], index=index))
    assert source.seen == ["a/0", "a/0"]


def test_a_resume_draws_what_an_uninterrupted_run_draws() -> None:
    """With groups in flight, of which some fail."""

    def life(mix: Mix, tasks: list[Task], count: int) -> list[str]:
        drawn = []
        for _ in range(count):
            done = tasks.pop(0)
            mix.observe(group(done, [0.0, 1.0], lost=len(done.id) % 3))
            tasks += drain(mix, 1)
            drawn.append(tasks[-1].id)
        return drawn

    def fresh() -> Mix:
        return mixed(endless("a"), endless("b"), endless("c"), weights=[3, 2, 1])

    whole = fresh()
    in_flight = drain(whole, 20)
    life(whole, in_flight, 100)
    state, tasks = json.loads(json.dumps(whole.state())), list(in_flight)
    resumed = fresh()
    resumed.restore(state)
    assert life(resumed, tasks, 100) == life(whole, in_flight, 100)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_do_not_fit_are_refused(weights: list[float]) -> None:
    sources = {"a": finite("a", 1), "b": finite("b", 1)}
    with refused_at("mix", "a weight of 0 or more for each of a, b, one above 0"):
        Mix(sources, dict(zip("ab", weights, strict=False)))


def test_the_state_of_another_mixture_is_refused() -> None:
    state = mixed(finite("a", 1), weights=[1]).state()
    with refused_at("mix", "the state"):
        mixed(finite("a", 1), finite("b", 1), weights=[1, 1]).restore(state)


TASK = Task(id="t", env="a", messages=())


@pytest.mark.parametrize(
    ("given", "drops_equal", "part"),
    [
        (group(TASK, [0.0, 1.0]), True, 1.0),
        (group(TASK, [1.0, 1.0]), True, 0.0),
        (group(TASK, [0.1 + 0.2, 0.3]), True, 0.0),  # they differ by rounding
        (group(TASK, [1.0, 1.0]), False, 1.0),
        (group(TASK, [0.0, 1.0, 1.0], lost=1), True, 0.75),
        (group(TASK, [], lost=4), False, 0.0),
    ],
)
def test_a_group_counts_with_its_trained_part(given: Group, drops_equal: bool, part: float) -> None:
    assert trained_part(given, drops_equal=drops_equal) == part


Fate = Callable[[Random], Group]


def simulated(weights: Mapping[str, float], max_lag: int, seed: int) -> float:
    """The largest deviation, over any 50 steps, of an environment's share of the trained rollouts from its weight, in
    percentage points. Of `b` 30 % of the rollouts are lost, of `c` half the groups are filtered. As many groups are in
    flight as the window allows, always: how long they take then changes nothing."""
    random = Random(seed)
    mix = Mix({name: endless(name) for name in weights}, weights, drops_equal=True)
    in_flight: deque[Task] = deque()
    trained: list[dict[str, float]] = [dict.fromkeys(weights, 0.0) for _ in range(STEPS)]
    for index in range(STEPS * GROUPS):
        most = min(STEPS, index // GROUPS + 1 + max_lag) * GROUPS
        in_flight += drain(mix, most - index - len(in_flight))
        task = in_flight.popleft()
        left = SIZE - sum(random.random() < 0.3 for _ in range(SIZE)) if task.env == "b" else SIZE
        equal = task.env == "c" and random.random() < 0.5
        done = group(task, [1.0] * left if equal else [place / SIZE for place in range(left)], lost=SIZE - left)
        trained[index // GROUPS][task.env] += trained_part(done, drops_equal=True)
        mix.observe(done)
    worst = 0.0
    for first in range(STEPS - 49):
        sums = {name: sum(step[name] for step in trained[first : first + 50]) for name in weights}
        total = sum(sums.values())
        worst = max(worst, *(abs(sums[name] / total - weights[name]) for name in weights))
    return 100 * worst


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("max_lag", "most"), [(0, 1.0), (2, 1.5), (8, 2.5)])
def test_trained_groups_follow_the_weights(max_lag: int, most: float, seed: int) -> None:
    assert simulated({"a": 0.5, "b": 0.3, "c": 0.2}, max_lag, seed) <= most


def test_a_dead_environment_does_not_take_all_draws() -> None:
    mix = mixed(endless("a"), endless("b"), weights=[3, 1])
    drawn = []
    for _ in range(1000):
        (task,) = drain(mix, 1)
        drawn.append(task.env)
        mix.observe(group(task, [], lost=4) if task.env == "b" else group(task, [0.0, 1.0]))
    assert drawn.count("a") > 400


def test_the_deficit_of_a_revived_environment_is_bounded() -> None:
    """While b is dead for 1,000 groups, a goes on; afterwards b gets its weight and little more."""
    mix = mixed(endless("a"), endless("b"), weights=[1, 1])
    drawn = []
    for number in range(3000):
        (task,) = drain(mix, 1)
        drawn.append(task.env)
        mix.observe(group(task, [0.0, 1.0] if task.env == "a" or number > 1000 else [], lost=0))
    assert 0.45 < drawn[2000:].count("b") / 1000 < 0.55


def test_metrics_are_per_environment() -> None:
    mix = mixed(endless("a"), endless("b"), weights=[1, 1])
    for task in drain(mix, 4):
        mix.observe(group(task, [0.0, 1.0]) if task.env == "a" else group(task, [0.5], lost=1))
    values = mix.metrics()
    assert (values["rollout/a/share"], values["rollout/b/trained_part"]) == (pytest.approx(2 / 3), 0.5)
    assert (values["rollout/a/reward"], values["rollout/b/reward"]) == (0.5, 0.5) and mix.metrics() == {}
