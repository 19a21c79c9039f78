"""Sources that end, block, repeat ids or give what is no task: on a virtual clock where they do not block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fates import make_stack
from refusals import refused_at
from virtual import on_event_loop, on_virtual_clock

from sparring.harness.chat import ChatHarness
from sparring.rollout.feed import MOST_LEFT_OUT, TaskFeed, problem_of
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyTasks, ToyWorld, toy_task
from sparring.types import BoxSpec, Group, Task

ODD: dict[str, Any] = {
    "no task": {"id": "train-2", "prompt": "What?"},
    "a long seed": replace(toy_task(2), seed=2**64),
    "a seed that is none": replace(toy_task(2), seed="2"),  # type: ignore[arg-type]
    "no id": replace(toy_task(2), id=""),
    "an id that is none": replace(toy_task(2), id=2),  # type: ignore[arg-type]
    "messages that are none": replace(toy_task(2), messages=("What is 1 + 1?",)),  # type: ignore[arg-type]
    "limits that are none": replace(toy_task(2), limits=None),  # type: ignore[arg-type]
    "data that nobody can write down": replace(toy_task(2), data={"a": object()}),
}


class Spoilt(ToyTasks):
    """Sums, with something else in the place of one."""

    def __init__(self, other: Any, place: int = 2) -> None:
        super().__init__("train", None)
        self._other, self._place = other, place

    def next(self) -> Task | None:
        task = super().next()
        return self._other if self.state()["next"] == self._place + 1 else task  # type: ignore[no-any-return]


def run(source: Any, steps: int = 2, **config: Any) -> tuple[list[Group], Scheduler, list[str]]:
    """Steps of three groups of two."""
    told: list[str] = []
    stack = make_stack(group_size=2, **config)
    boxes = BubblewrapBoxes(SandboxConfig(enabled=False))
    runner = RolloutRunner(ToyWorld(), boxes, stack.recorder, ChatHarness(), stack.config, report=told.append)
    scheduler = Scheduler(runner, source, Window(3, steps, steps), run_seed=0, engine_version=lambda: 0)

    async def collected() -> list[Group]:
        return [group async for group in scheduler.groups()]

    return run_virtual(collected())[0], scheduler, told


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_invalid_task_is_left_out_alone(odd: Any) -> None:
    groups, scheduler, told = run(Spoilt(odd))
    assert [group.task.id for group in groups] == [f"train-{number}" for number in (0, 1, 3, 4, 5, 6)]
    assert all(len(group.rollouts) == 2 for group in groups)
    assert scheduler.metrics()["rollout/tasks_left_out"] == 1 and "rollout/tasks_left_out" not in scheduler.metrics()
    [left_out] = [text for text in told if not text.startswith("rollout/equal_rewards: ")]
    assert left_out.startswith("a task is left out: ") and "expected" in left_out


def test_a_good_task_has_no_problem() -> None:
    assert problem_of(replace(toy_task(), seed=2**64 - 1, data={"deep": [{"a": 1.5}, None]}, box=BoxSpec())) == ""


def test_a_task_with_an_unknown_image_is_lost_by_itself() -> None:
    groups, _, _ = run(Spoilt(replace(toy_task(2), box=BoxSpec(image="windows-3.11"))))
    (lost,) = [group for group in groups if not group.rollouts]
    assert lost.index == 2 and [rollout.attempt for rollout in lost.failed] == [0, 0], "it is not tried again"
    failure = lost.failed[0].outcome.failure
    assert failure is not None and (failure.error, failure.where) == ("TaskError", "box.image")


def test_a_task_that_is_in_flight_twice_is_rolled_out_twice() -> None:
    """Also where it is another one under the same id."""
    other = replace(toy_task(9), id="train-1")
    groups, _, told = run(Spoilt(other))
    assert [group.task.id for group in groups][:3] == ["train-0", "train-1", "train-1"] and not told
    assert groups[2].task == other and all(len(group.rollouts) == 2 for group in groups)


def test_a_source_of_invalid_tasks_ends_the_run() -> None:
    class Nothing(ToyTasks):
        def next(self) -> Task | None:
            return "nothing"  # type: ignore[return-value]

    with refused_at("tasks", f"{MOST_LEFT_OUT} in a row that cannot (expected a Task"):
        run(Nothing("train", None))


@pytest.mark.parametrize("max_lag", [0, 2])
@on_virtual_clock
async def test_a_source_that_ends_within_a_step_leaves_a_smaller_one(max_lag: int) -> None:
    told: list[str] = []
    stack = make_stack(group_size=2)
    boxes = BubblewrapBoxes(SandboxConfig(enabled=False))
    runner = RolloutRunner(ToyWorld(), boxes, stack.recorder, ChatHarness(), stack.config, report=told.append)
    window = Window(3, max_lag, 9)

    def scheduler_of(window: Window) -> Scheduler:
        version = partial(getattr, window, "released_steps")
        return Scheduler(runner, ToyTasks("train", 7), window, run_seed=0, engine_version=version)

    scheduler = scheduler_of(window)
    indices = []
    async for group in scheduler.groups():
        indices.append(group.index)
        if group.index % 3 == 2:
            window.release(group.index // 3 + 1)
    assert indices == list(range(7)) and told == ["the tasks end after 7 groups: 3 steps, the last of them of 1 of 3"]
    window.release(3)
    state = scheduler.state(3)
    resumed = scheduler_of(Window(3, max_lag, 9))
    resumed.restore(state)
    assert [group.index async for group in resumed.groups()] == []


class Slow(ToyTasks):
    """Sums that come only when they are let."""

    def __init__(self) -> None:
        super().__init__("train", None)
        self.let = threading.Semaphore(0)
        self.inside = False
        self.observed: list[str] = []

    def next(self) -> Task | None:
        self.inside = True
        self.let.acquire()
        self.inside = False
        return super().next()

    def observe(self, group: Group) -> None:
        assert not self.inside
        self.observed.append(group.task.id)


@on_event_loop
async def test_a_source_that_blocks_holds_nothing_up_and_observes_afterwards() -> None:
    source = Slow()
    feed = TaskFeed(source, lambda sentence: None)
    asked = asyncio.ensure_future(feed.next())
    for _ in range(3):
        await asyncio.sleep(0)  # the loop runs on
    assert not asked.done() and source.inside
    feed.observe(Group(id="g", index=0, task=toy_task(7), rollouts=(), scores=()))
    assert source.observed == []
    source.let.release()
    task = await asked
    assert task is not None and task.id == "train-0" and source.observed == ["train-7"]
    feed.close()


@on_event_loop
async def test_a_source_that_never_answers_is_left_behind() -> None:
    source = Slow()
    feed = TaskFeed(source, lambda sentence: None)
    asked = asyncio.ensure_future(feed.next())
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    feed.close()
    assert threading.active_count() > 1
    source.let.release()


def fails(error: BaseException) -> Callable[[], Task | None]:
    def raising() -> Task | None:
        raise error

    return raising


@pytest.mark.parametrize("error", [OSError("the data file is gone"), TimeoutError("too slow")])
def test_an_error_of_a_source_is_raised(error: Exception) -> None:
    class Dead(ToyTasks):
        next = staticmethod(fails(error))  # type: ignore[assignment]

    with pytest.raises(type(error), match=str(error)):
        run(Dead("train", None))
