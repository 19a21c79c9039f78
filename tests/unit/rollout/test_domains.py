"""Several environments in one run, on a virtual clock: each has its own worlds, places, scale and harness."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fates import make_stack

from sparring.envs.domains import Domains
from sparring.harness.by_environment import HarnessByEnvironment
from sparring.harness.chat import ChatHarness
from sparring.protocols import Episode, Sandbox
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.scorers.reward_scale import RewardScale
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.tasks.mix import Mix, trained_part
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyEnv, ToyTasks, ToyWorld, toy_task
from sparring.types import Group, Observation, Score, Task, Trajectory


class TimedWorld(ToyWorld):
    """Worlds that take some seconds to open, and how many were open at once. Some break; of some tasks all rollouts
    earn the same."""

    def __init__(self, open_s: float = 0.0, lost_in_ten: int = 0, equal_in_ten: int = 10) -> None:
        self.open_s, self.lost_in_ten, self.equal_in_ten = open_s, lost_in_ten, equal_in_ten
        self.running = self.most = self.opened = 0

    def make(self) -> TimedEnv:
        return TimedEnv(self)


class TimedEnv(ToyEnv):
    """One of them."""

    def __init__(self, world: TimedWorld) -> None:
        super().__init__()
        self._world = world

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        world = self._world
        world.opened, world.running = world.opened + 1, world.running + 1
        world.most = max(world.most, world.running)
        number = world.opened
        await asyncio.sleep(world.open_s)
        if number * 7 % 10 < world.lost_in_ten:
            raise OSError(f"lost: {number}")
        return await super().open(task, box)

    async def score(self, trajectory: Trajectory) -> Score | None:
        if int(trajectory.task.rpartition("-")[2]) * 7 % 10 < self._world.equal_in_ten:
            return await super().score(trajectory)
        return Score(reward=int(trajectory.id.split("/")[2]) % 2)

    async def close(self) -> None:
        self._world.running -= 1


def scheduled(
    domains: Domains, weights: dict[str, float], steps: int, **settings: Any
) -> tuple[Scheduler, Window, Mix]:
    groups_per_step = settings.pop("groups_per_step", 4)
    stack = make_stack(**{"group_size": 2, "max_concurrent_rollouts": 64, **settings.pop("config", {})})
    runner = RolloutRunner(
        domains,
        BubblewrapBoxes(SandboxConfig(enabled=False)),
        stack.recorder,
        settings.pop("harness", ChatHarness()),
        stack.config,
    )
    window = Window(groups_per_step, stack.config.max_lag, steps)
    source = Mix(domains.sources("train", 0), weights, drops_equal=settings.pop("drops_equal", False))
    scheduler = Scheduler(runner, source, window, run_seed=0, engine_version=lambda: window.released_steps, **settings)
    return scheduler, window, source


async def trained(scheduler: Scheduler, window: Window, train_s: float = 1.0) -> list[Group]:
    taken = []
    async for group in scheduler.groups():
        taken.append(group)
        if len(taken) % window.groups_per_step == 0:
            await asyncio.sleep(train_s)
            window.release(len(taken) // window.groups_per_step)
    return taken


def test_each_environment_has_its_own_worlds_tasks_and_places() -> None:
    slow, fast = TimedWorld(open_s=100.0), TimedWorld(open_s=1.0)
    domains = Domains({"slow": slow, "fast": fast}, {"slow": 3})
    scheduler, window, source = scheduled(domains, {"slow": 1, "fast": 1}, 6)
    groups, _ = run_virtual(trained(scheduler, window))
    assert [group.task.env for group in groups].count("slow") == 12 and slow.opened == fast.opened == 24
    assert slow.most == 3 and fast.most == 4
    assert all(group.task.id.startswith(f"{group.task.env}/train-") for group in groups)
    values = source.metrics()
    assert values["rollout/slow/share"] == 0.5 and values["rollout/fast/reward"] == 1.0


def test_a_scale_is_of_one_environment() -> None:
    domains = Domains({"one": ToyWorld(), "two": ToyWorld()})
    scheduler, window, _ = scheduled(domains, {"one": 1, "two": 1}, 2, scorers=[RewardScale({"two": 10.0})])
    groups, _ = run_virtual(trained(scheduler, window))
    assert {(group.task.env, score.reward) for group in groups for score in group.scores} == {
        ("one", 1.0),
        ("two", 10.0),
    }


def test_a_scale_reaches_every_reward_and_no_named_part() -> None:
    score = Score(
        reward=1.0,
        parts={"style": 0.5},
        per_turn=(0.5, 0.25),
        per_step=(((3, 0.5),), ()),
        per_role={"a": 2.0},
        per_role_turns={"a": (1.0,)},
    )

    async def main() -> Score:
        (scaled,) = await RewardScale({"toy": 2.0}).score(toy_task(), [], [score])
        return scaled

    scaled = asyncio.run(main())
    assert (scaled.reward, scaled.per_turn, scaled.per_step) == (2.0, (1.0, 0.5), (((3, 1.0),), ()))
    assert (scaled.per_role, scaled.per_role_turns, scaled.parts) == ({"a": 4.0}, {"a": (2.0,)}, {"style": 0.5})


def test_each_environment_has_its_harness() -> None:
    held: list[str] = []

    class Named(ChatHarness):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def run(self, episode: Episode) -> None:
            held.append(f"{self.name} holds {episode.task.env}")
            await super().run(episode)

    domains = Domains({"one": ToyWorld(), "two": ToyWorld()})
    harness = HarnessByEnvironment({name: Named(name) for name in domains.factories})
    scheduler, window, _ = scheduled(domains, {"one": 1, "two": 1}, 1, harness=harness)
    run_virtual(trained(scheduler, window))
    assert sorted(set(held)) == ["one holds one", "two holds two"]


def test_evaluation_deals_tasks_evenly_and_by_environment() -> None:
    source = Domains({"one": ToyWorld(), "two": ToyWorld()}).tasks("eval", 0)
    tasks = list(iter(source.next, None))
    assert len(tasks) == 40 and len({task.id for task in tasks if task}) == 40
    assert [task.env for task in tasks[:4] if task] == ["one", "two", "one", "two"]


def test_a_stream_of_several_environments_resumes() -> None:
    domains = Domains({"one": ToyWorld(), "two": ToyWorld()})
    source, resumed = domains.tasks("eval", 0), domains.tasks("eval", 0)
    for _ in range(7):
        source.next()
    resumed.restore(source.state())
    assert list(iter(resumed.next, None)) == list(iter(source.next, None))


class Untagged(ToyTasks):
    """Tasks without a tag."""

    def next(self) -> Task | None:
        task = super().next()
        return task and Task(id=task.id, env="x", messages=task.messages, data=task.data)


def test_the_environment_is_the_tag_where_there_is_none() -> None:
    class World(ToyWorld):
        def tasks(self, split: str, seed: int) -> ToyTasks:
            return Untagged(split, None)

    task = Domains({"one": World()}).tasks("train", 0).next()
    assert task is not None and (task.tag, task.env, task.id) == ("one", "one", "one/train-0")


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "most"), [(2, 1.5), (8, 2.5)])
def test_the_mix_of_what_is_trained_keeps_to_the_weights(max_lag: int, most: float) -> None:
    """The whole path: latencies 100 times apart, one environment loses 30 % of its rollouts, one is filtered by
    half."""
    worlds = {
        "a": TimedWorld(1.0, equal_in_ten=0),
        "b": TimedWorld(100.0, lost_in_ten=3, equal_in_ten=0),
        "c": TimedWorld(10.0, equal_in_ten=5),
    }
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    config = {"group_size": 4, "max_concurrent_rollouts": 1000, "max_lag": max_lag, "retries": 0}
    scheduler, window, _ = scheduled(Domains(worlds), weights, 120, groups_per_step=16, config=config, drops_equal=True)
    groups, _ = run_virtual(trained(scheduler, window, train_s=30.0))
    left = [(group.task.env, trained_part(group, drops_equal=True)) for group in groups]
    size = 50 * 16
    for first in range(0, len(left) - size + 1, 16):
        part = left[first : first + size]
        total = sum(number for _, number in part)
        for name, weight in weights.items():
            share = sum(number for env, number in part if env == name) / total
            assert 100 * abs(share - weight) <= most
