"""Environments that block their thread or ignore cancellation cost their own rollout alone: real threads, real
time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from fates import FatedBoxes, Fates, make_stack

from sparring.envs.base import Env, tool
from sparring.envs.threads import LoopThreads
from sparring.protocols import Sandbox
from sparring.rollout.journal import Journals
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyWorld, toy_renderer, toy_script
from sparring.types import Group, Message, Observation, Task

RELEASED = threading.Event()
"""What blocked code waits for: set once everything else is done."""


LIMIT_S = 1.0
"""Seconds that a phase may take: what does not block needs a hundredth."""


class Adds(Env):
    """Sums with a tool. The rollout that is made first goes wrong."""

    made = 0

    def __init__(self, args: Any = None) -> None:
        super().__init__(args)
        self.first = type(self).made == 0
        type(self).made += 1

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    def reward(self, completion: str, task: Task) -> float:
        """1 for the right sum."""
        return float(completion.endswith(f"{task.data['a'] + task.data['b']}."))


class BlockingTool(Adds):
    """A plain tool that blocks."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        if self.first:
            RELEASED.wait()
        return a + b


class BlockingStep(Adds):
    """A coroutine function that blocks."""

    async def step(self, reply: Message) -> Observation:
        if self.first:
            RELEASED.wait()
        return await super().step(reply)


class BlockingOpen(Adds):
    """An opening that blocks."""

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        if self.first:
            RELEASED.wait()
        return await super().open(task, box)


class BlockingMaking(Adds):
    """A constructor that blocks."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(args)
        if self.first:
            RELEASED.wait()


class BlockingReward(Adds):
    """A plain reward that blocks."""

    def reward(self, completion: str, task: Task) -> float:
        if self.first:
            RELEASED.wait()
        return super().reward(completion, task)


class Deaf(Adds):
    """A tool that ignores cancellation."""

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        while self.first and not RELEASED.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass
        return a + b


class World(ToyWorld):
    """Makes environments of one class."""

    def __init__(self, kind: type[Adds]) -> None:
        self.kind = kind
        kind.made = 0

    def make(self) -> Any:
        return self.kind()


def quick_engine() -> ScriptedEngine:
    """An engine that answers at once."""
    return ScriptedEngine(toy_script(toy_renderer()))


@pytest.mark.parametrize("kind", [BlockingTool, BlockingStep, BlockingOpen, BlockingMaking, BlockingReward, Deaf])
def test_an_environment_that_blocks_costs_its_rollout_alone(kind: type[Adds]) -> None:
    """The event loop and the other rollouts go on: the one that blocks does so until they are all over."""
    limits = dict.fromkeys(("open_s", "tool_s", "score_s", "close_s"), LIMIT_S)
    stack = make_stack(engine=quick_engine(), group_size=4, rebuilds=0, **limits)
    threads, events = LoopThreads(grace_s=0.05), []

    def recorded(event: str, rollout_id: str, data: Mapping[str, Any]) -> None:
        events.append((event, rollout_id))

    runner = RolloutRunner(
        World(kind),
        FatedBoxes(Fates()),
        stack.recorder,
        stack.runner.harness,
        stack.config,
        executors=threads.executor,
        log=Journals(recorded=recorded),
    )
    source = ToyWorld().tasks("train", 0)
    scheduler = Scheduler(runner, source, Window(2, 0, 1), run_seed=5, engine_version=lambda: 0)

    async def main() -> list[Group]:
        try:
            return [group async for group in scheduler.groups()]
        finally:
            RELEASED.set()

    RELEASED.clear()
    groups = asyncio.run(main())
    (lost,) = [rollout for group in groups for rollout in group.failed]
    assert sum(len(group.rollouts) for group in groups) == 7
    assert all(score.reward == 1.0 for group in groups for score in group.scores)
    assert lost.outcome.kind == ("judge_failed" if kind is BlockingReward else "infra_failed")
    assert lost.outcome.failure is not None and f"after {LIMIT_S:g} s" in lost.outcome.failure.message
    assert runner.abandoned == 1 and ("abandoned", lost.id) in events and ("limit", lost.id) in events


def test_an_environment_keeps_one_thread_from_its_making_to_its_closing() -> None:
    threads: set[int] = set()

    class Bound(Adds):
        """Remembers its threads."""

        def __init__(self, args: Any = None) -> None:
            super().__init__(args)
            threads.add(threading.get_ident())

        @tool
        def add(self, a: int, b: int) -> int:
            """Add."""
            threads.add(threading.get_ident())
            return super().add(a, b)

        async def close(self) -> None:
            threads.add(threading.get_ident())

    stack = make_stack(engine=quick_engine())
    executors = LoopThreads().executor
    harness = stack.runner.harness
    runner = RolloutRunner(
        World(Bound), FatedBoxes(Fates()), stack.recorder, harness, stack.config, executors=executors
    )
    task = ToyWorld().tasks("train", 0).next()
    assert task is not None
    done = asyncio.run(runner.run(task, rollout_id="rl/0/0", index=0, seed=1))
    assert done.score is not None and done.score.reward == 1.0
    assert len(threads) == 1 and threads != {threading.get_ident()}
