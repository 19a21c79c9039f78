"""Evaluation beside training, on a virtual clock: training waits for nothing, and trains what it trains without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from virtual import on_virtual_clock

from sparring.errors import StoreError
from sparring.harness.chat import ChatHarness
from sparring.observe.evaluation import Evaluation
from sparring.record.recorder import Recorder
from sparring.rollout.config import RolloutConfig
from sparring.rollout.evaluate import EvalPlan
from sparring.rollout.evaluator import Evaluator
from sparring.rollout.load import EvalShare
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import Group, Message, Observation, WeightRef

TASKS = [toy_task(number, split="eval") for number in range(5)]
LONG_S = 25.0


class LongWorld(ToyWorld):
    """Evaluation's steps take longer than several training steps; one may die."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        self.open = 0

    def make(self) -> ToyEnv:
        """A fresh world."""
        return LongEnv(self)


class LongEnv(ToyEnv):
    """One of them."""

    def __init__(self, world: LongWorld) -> None:
        super().__init__()
        self._world = world
        world.open += 1

    async def step(self, reply: Message) -> Observation:
        """Evaluation waits."""
        assert self._task is not None
        if self._task.id.startswith("eval"):
            if self._world.dies:
                raise StoreError("disk full")
            await asyncio.sleep(LONG_S)
        return await super().step(reply)

    async def close(self) -> None:
        """It is counted."""
        self._world.open -= 1
        await super().close()


class Life:
    """A training of `steps` steps with an evaluator beside it, and what happened in which order."""

    def __init__(self, store: SqliteStore, *, every: int, dies: bool = False, concurrent: int = 2) -> None:
        settings = RolloutConfig(group_size=3)
        self.world = LongWorld(dies)
        self.engine = ScriptedEngine(toy_script(toy_renderer(), errors_in_ten=3), latency_s=1.0)
        recorder = Recorder(self.engine, toy_renderer(), store, sampling=settings.sampling.build())
        boxes = BubblewrapBoxes(SandboxConfig(enabled=False))
        runner = RolloutRunner(self.world, boxes, recorder, ChatHarness(), settings)
        self.window = Window(2, 0)
        self.events: list[str] = []
        self.results: dict[int, Evaluation] = {}
        self.trained: list[Group] = []
        self.scheduler = Scheduler(
            runner, self.world.tasks("train", 0), self.window, run_seed=5, engine_version=lambda: self.engine.version
        )
        self.evaluator = Evaluator(
            runner,
            EvalPlan(tasks=TASKS, run_seed=5, stage="rl/eval"),
            every=every,
            share=EvalShare(self.scheduler.places, 0.2, concurrent, lambda: self.window.next_index),
            store=store,
            on_result=self._on_result,
            left_out=lambda step, other: self.events.append(f"no evaluation {step} beside {other}"),
        )

    def _on_result(self, step: int, result: Evaluation) -> None:
        self.events.append(f"evaluation {step}")
        self.results[step] = result

    async def train(self, steps: int) -> None:
        """The way `run_loop` does it."""
        async with self.evaluator:
            async for group in self.scheduler.groups():
                self.trained.append(group)
                if len(self.trained) % 2:
                    continue
                step = len(self.trained) // 2
                await self.engine.pull(
                    WeightRef(model="policy", version=step, checksum="", transport="", location=None)
                )
                self.window.release(step)
                self.events.append(f"step {step}")
                self.evaluator.after(step)
                if step == steps:
                    break
            await self.scheduler.close()
            await self.evaluator.finish()


@pytest.fixture
def store(tmp_path: Path):
    """Closed at the end."""
    store = SqliteStore(tmp_path / "store.sqlite")
    yield store
    store.close()


def test_training_steps_do_not_wait_for_it(store: SqliteStore) -> None:
    life = Life(store, every=2)
    run_virtual(life.train(6))
    steps = [f"step {step}" for step in range(1, 7)]
    assert life.events == [
        *steps[:4],
        "no evaluation 4 beside 2",
        *steps[4:],
        "no evaluation 6 beside 2",
        "evaluation 2",
    ]
    assert life.results[2].versions == (2, 6) and life.results[2].rollouts == 5
    assert [g.id for g in store.groups(stage="rl/eval/2")] == [f"rl/eval/2/{n}" for n in range(5)]
    admissions = [r.admission for r in life.engine.requests if r.id.startswith("rl/eval")]
    assert admissions[:2] == [6, 6] and admissions[-1] > 6, "they queue with the group that is admitted when they begin"
    assert {r.priority for r in life.engine.requests} == {0}


def test_one_that_is_done_makes_room_for_the_next(store: SqliteStore) -> None:
    life = Life(store, every=30, concurrent=5)
    run_virtual(life.train(60))
    assert [event for event in life.events if "evaluation" in event] == ["evaluation 30", "evaluation 60"]
    assert life.results[30].versions == (30, 43) and life.results[60].versions == (60, 60)


def test_training_trains_the_same_without_it(store: SqliteStore) -> None:
    one, other = Life(store, every=1), Life(store, every=0)
    _, with_it = run_virtual(one.train(6))
    _, without = run_virtual(other.train(6))
    assert other.events == [f"step {step}" for step in range(1, 7)] and with_it > without + LONG_S
    for a, b in zip(one.trained, other.trained, strict=True):
        assert (a.scores, a.version, a.task) == (b.scores, b.version, b.task)
        assert [t.segments for r in a.rollouts for t in r.trajectories] == [
            t.segments for r in b.rollouts for t in r.trajectories
        ]


def test_what_kills_it_kills_the_run(store: SqliteStore) -> None:
    life = Life(store, every=2, dies=True)
    with pytest.raises(StoreError, match="disk full"):
        run_virtual(life.train(6))
    assert life.events == [f"step {step}" for step in range(1, 5)] and life.world.open == 0


@on_virtual_clock
async def test_a_run_that_stops_stops_it(store: SqliteStore) -> None:
    life = Life(store, every=2)
    training = asyncio.ensure_future(life.train(1000))
    while "step 3" not in life.events:
        await asyncio.sleep(1)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    await life.scheduler.close()
    assert "evaluation 2" not in life.events and life.world.open == 0


def test_what_a_crash_cut_off_begins_again(store: SqliteStore) -> None:
    first = Life(store, every=2)

    async def half() -> None:
        async with first.evaluator:
            first.evaluator.after(2)
            await asyncio.sleep(2.5 * LONG_S)

    run_virtual(half())
    assert 0 < len(list(store.groups(stage="rl/eval/2"))) < 5
    again = Life(store, every=2)

    async def whole() -> None:
        async with again.evaluator:
            again.evaluator.after(2)
            await again.evaluator.finish()

    run_virtual(whole())
    assert again.results[2].rollouts == 5 and len(again.engine.requests) == 2 * 5
