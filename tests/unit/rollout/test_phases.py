"""Whose time it is: every phase of an attempt has a limit of its own, and only the policy's own commands are its
time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fates import EmptyBox, FatedBoxes, FatedWorld, Fates, Stack, make_stack

from sparring.errors import SparringError
from sparring.harness.load import CallableHarness
from sparring.protocols import Episode, Sandbox
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import BoxSpec, ExecResult, Message, Observation, Outcome, Task

BOXED = replace(toy_task(), box=BoxSpec())
FOREVER_S = 1e9


def forever(number: int) -> float:
    """Hang at every call."""
    return FOREVER_S


def slow_engine(latency_s: float) -> ScriptedEngine:
    """An engine that takes its time for each reply."""
    return ScriptedEngine(toy_script(toy_renderer()), latency_s=latency_s)


def with_harness(stack: Stack, harness: Any, world: ToyWorld | None = None) -> tuple[RolloutRunner, list[Any]]:
    """The stack's runner with another harness, and the events that it records."""
    events: list[Any] = []

    def recorded(kind: str, rollout_id: str, data: Mapping[str, Any]) -> None:
        events.append((kind, rollout_id, dict(data)))

    world = world or FatedWorld(stack.fates)
    boxes = FatedBoxes(stack.fates)
    runner = RolloutRunner(world, boxes, stack.recorder, harness, stack.config, log=Journals(recorded=recorded))
    return runner, events


def run(runner: RolloutRunner, task: Task = BOXED) -> Finished:
    """One rollout on a virtual clock."""
    return run_virtual(runner.run(task, rollout_id="rl/0/0", index=0, seed=1))[0]


@pytest.mark.parametrize(
    ("fates", "error"),
    [
        (Fates(take=forever), "SandboxError"),
        (Fates(open=forever), "EnvError"),
        (Fates(step=forever), "ToolHostError"),
        (Fates(step=lambda number: FOREVER_S if number % 2 else None), "ToolHostError"),
    ],
)
@pytest.mark.parametrize("retries", [0, 2])
def test_a_hang_is_the_infrastructures_failure(fates: Fates, error: str, retries: int) -> None:
    stack = make_stack(fates, rebuilds=retries)
    done = stack.run(BOXED)
    assert done.score is None and done.rollout.outcome.kind == "infra_failed" and len(done.broken) == retries
    assert done.rollout.outcome.failure is not None and done.rollout.outcome.failure.error == error
    assert stack.fates.open_worlds == stack.fates.open_boxes == 0 and stack.engine.held == {}


def test_a_stalled_engine_is_the_infrastructures_failure() -> None:
    done = make_stack(engine=slow_engine(FOREVER_S), rebuilds=1).run(BOXED)
    assert done.score is None and done.rollout.outcome.kind == "infra_failed"
    assert done.rollout.outcome.failure is not None and done.rollout.outcome.failure.error == "EngineError"


@pytest.mark.parametrize("fates", [Fates(), Fates(open=lambda number: 100.0), Fates(score=lambda number: 100.0)])
def test_only_the_policys_commands_are_on_its_clock(fates: Fates) -> None:
    """An evaluation waits so for each turn while training fills the engine."""
    done = make_stack(fates, engine=slow_engine(500.0), timeout_s=10.0).run(BOXED)
    assert done.rollout.outcome.kind == "completed" and done.score is not None and done.score.reward == 1.0


def test_the_policys_commands_add_up() -> None:
    inside = make_stack(Fates(step=lambda number: 5.0), timeout_s=10.0).run(BOXED)
    assert inside.rollout.outcome.kind == "completed"
    beyond = make_stack(Fates(step=lambda number: 5.1), timeout_s=10.0).run(BOXED)
    assert beyond.rollout.outcome == Outcome(kind="truncated", reason="timeout")


class QueuedBox(EmptyBox):
    """A box whose commands wait for a place."""

    queued_s = 0.0

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        await asyncio.sleep(48.0)
        self.queued_s += 48.0
        return ExecResult(exit_code=0, stdout="", stderr="", wall_s=0.0)


class QueuedBoxes(FatedBoxes):
    """A pool of such."""

    async def take(self, spec: BoxSpec) -> QueuedBox:
        return QueuedBox(Fates())


class QueuedEnv(ToyEnv):
    """Spends 50 s a step, 48 of them in the queue of its box."""

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        self.box: Any = box
        return await super().open(task, box)

    async def step(self, reply: Message) -> Observation:
        await asyncio.sleep(2.0)
        await self.box.exec(["true"])
        return await super().step(reply)


class QueuedWorld(ToyWorld):
    """Makes such environments."""

    def make(self) -> ToyEnv:
        return QueuedEnv()


def test_waiting_for_a_place_to_run_a_command_is_not_the_policys_time() -> None:
    for timeout_s, ending in ((5.0, "completed"), (3.0, "truncated")):
        stack = make_stack(timeout_s=timeout_s)
        harness = stack.runner.harness
        runner = RolloutRunner(QueuedWorld(), QueuedBoxes(stack.fates), stack.recorder, harness, stack.config)
        assert run(runner).rollout.outcome.kind == ending


def test_a_limit_that_strikes_is_recorded() -> None:
    stack = make_stack(Fates(step=lambda number: FOREVER_S if number == 1 else 20.0), rebuilds=0, tool_s=30.0)
    runner, events = with_harness(stack, stack.runner.harness)
    run(runner)
    assert events == [("limit", "rl/0/0", {"phase": "tool", "detail": "", "turn": 2, "seconds": 30.0})]
    stack = make_stack(Fates(step=lambda number: 20.0), timeout_s=10.0)
    runner, events = with_harness(stack, stack.runner.harness)
    run(runner)
    assert events == [("limit", "rl/0/0", {"phase": "policy", "turn": 1, "seconds": 20.0, "answers": 2})]


def test_a_harness_that_asks_for_nothing_has_failed() -> None:
    async def idle(episode: Episode) -> None:
        await episode.env.open(episode.task, episode.box)
        await asyncio.sleep(FOREVER_S)

    stack = make_stack(rebuilds=0)
    runner, events = with_harness(stack, CallableHarness(idle))
    done = run(runner)
    assert done.score is None and done.rollout.outcome.failure is not None
    assert done.rollout.outcome.failure.error == "EnvError" and "rollout.timeouts.tool_s" in str(done.rollout.outcome)
    assert [event[2]["phase"] for event in events] == ["harness"]


def test_a_harness_cannot_outlive_a_limit_that_struck() -> None:
    async def stubborn(episode: Episode) -> None:
        await episode.env.open(episode.task, episode.box)
        for _ in range(3):
            try:
                await episode.env.step(Message(role="assistant", content=""))
            except SparringError:
                continue

    stack = make_stack(Fates(step=lambda number: FOREVER_S if number == 0 else None), rebuilds=0)
    runner, events = with_harness(stack, CallableHarness(stubborn))
    done = run(runner)
    assert done.score is None and done.rollout.outcome.failure is not None
    assert done.rollout.outcome.failure.error == "ToolHostError" and stack.fates.calls["step"] == 1 and len(events) == 1


class Deaf(ToyEnv):
    """Ignores the first cancellation in one of its calls."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    async def _hang(self, call: str) -> None:
        if call == self._call:
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                await asyncio.sleep(FOREVER_S)

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        await self._hang("open")
        return await super().open(task, box)

    async def step(self, reply: Message) -> Observation:
        await self._hang("step")
        return await super().step(reply)


class DeafWorld(ToyWorld):
    """Makes such environments."""

    def __init__(self, call: str) -> None:
        self._call = call

    def make(self) -> ToyEnv:
        return Deaf(self._call)


@pytest.mark.parametrize("call", ["open", "step"])
def test_an_environment_that_ignores_cancellation_is_abandoned(call: str) -> None:
    stack = make_stack(rebuilds=0)
    runner, events = with_harness(stack, stack.runner.harness, DeafWorld(call))

    done = run(runner)
    assert done.score is None and done.rollout.outcome.kind == "infra_failed" and stack.fates.open_boxes == 0
    assert runner.abandoned == 1 and [event[0] for event in events] == ["abandoned", "limit"]
