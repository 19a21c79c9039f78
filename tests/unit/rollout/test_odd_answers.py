"""Whatever an environment or a scorer raises or returns has an outcome of its own: it costs its rollout, never the run,
and is no reward (law 6)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fates import FatedBoxes, make_stack

from sparring.errors import EvaluationFailed, Outage, SparringError, WeightsError
from sparring.harness.chat import ChatHarness
from sparring.protocols import Sandbox
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyEnv, ToyTasks, ToyWorld, toy_task
from sparring.types import Group, Message, Observation, Rollout, Score, Task, Trajectory

Change = Callable[[Any], Any]


class OddEnv(ToyEnv):
    """The toy world, of which one phase answers something else."""

    def __init__(self, phase: str, change: Change) -> None:
        super().__init__()
        self._phase, self._change = phase, change

    def _odd(self, phase: str, answer: Any) -> Any:
        return self._change(answer) if phase == self._phase else answer

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        return self._odd("open", await super().open(task, box))

    async def step(self, reply: Message) -> Observation:
        return self._odd("step", await super().step(reply))

    async def score(self, trajectory: Trajectory) -> Score | None:
        return self._odd("score", await super().score(trajectory))


class OddWorld(ToyWorld):
    """Makes odd worlds."""

    def __init__(self, phase: str, change: Change) -> None:
        self._phase, self._change = phase, change

    def make(self) -> OddEnv:
        return OddEnv(self._phase, self._change)


def finished(phase: str, change: Change) -> Finished:
    stack = make_stack(rebuilds=1)
    runner = RolloutRunner(
        OddWorld(phase, change), FatedBoxes(stack.fates), stack.recorder, ChatHarness(), stack.config
    )
    return run_virtual(runner.run(toy_task(1), rollout_id="rl/0/0", index=0, seed=1))[0]


def broken(phase: str, change: Change) -> str:
    """What the rollout broke of."""
    done = finished(phase, change)
    failure = done.rollout.outcome.failure
    assert done.score is None and done.rollout.outcome.kind == "infra_failed" and failure is not None
    return f"{failure.error}: {failure.where}: {failure.message}"


def raising(error: BaseException) -> Change:
    def change(answer: Any) -> Any:
        raise error

    return change


@pytest.mark.parametrize("phase", ["open", "step", "score"])
@pytest.mark.parametrize(
    "error",
    [
        Outage("all is down"),
        WeightsError("late"),
        EvaluationFailed("few"),
        SparringError("odd"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_no_failure_of_a_world_becomes_one(phase: str, error: BaseException) -> None:
    assert broken(phase, raising(error)) == f"EnvError: env.{phase}: {type(error).__name__}: {error}"


def test_a_score_whose_own_code_was_cancelled_is_a_failure() -> None:
    assert "its own code was cancelled" in broken("score", raising(asyncio.CancelledError()))


def says(**changes: Any) -> Change:
    return lambda answer: replace(answer, **changes)


@pytest.mark.parametrize("phase", ["open", "step"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (says(messages=("hello",)), "expected messages"),
        (says(messages=(Message(role="oracle", content="x"),)), "expected a message of system, user"),
        (says(messages=iter(())), "expected a tuple of messages"),
        (says(state_key=3), "expected the state"),
        (says(constraint="[0-9]"), "expected a Constraint or None"),
        (says(reward=math.inf), "expected a finite number"),
    ],
)
def test_an_observation_that_nobody_can_work_with_breaks_its_rollout_alone(
    phase: str, change: Change, told: str
) -> None:
    assert told in broken(phase, change)


ODD_SCORES = [
    (says(per_turn=(0.5,)), "expected per_turn"),
    (says(per_turn=(0.5, math.nan)), "expected a finite number"),
    (says(per_role_turns={"policy": (1.0,) * 3}), "expected per_turn"),
    (says(per_step=(((1, 0.5),), ((5000, 0.5),))), "got ends at [5000]"),
    (says(states=("a",)), "expected states"),
    (says(parts={"right": "yes"}), "expected a finite number"),
    (says(parts=["right"]), "expected parts by name"),
    (says(success="yes"), "expected success"),
]


@pytest.mark.parametrize(("change", "told"), ODD_SCORES)
def test_a_score_that_credit_or_reports_cannot_work_with_breaks_its_rollout_alone(change: Change, told: str) -> None:
    assert told in broken("score", change)


class OddScorer:
    """A second pass whose scores are odd."""

    def __init__(self, change: Change) -> None:
        self._change = change

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        return [self._change(score) for score in scores]


@pytest.mark.parametrize(("change", "told"), ODD_SCORES)
def test_such_a_score_of_a_second_pass_is_the_judges_failure(change: Change, told: str) -> None:
    stack = make_stack(group_size=2, rebuilds=1)
    scorers = [OddScorer(change)]
    source = ToyTasks("train", None)
    window = Window(1, 1, 1)
    scheduler = Scheduler(stack.runner, source, window, run_seed=0, engine_version=lambda: 0, scorers=scorers)

    async def every() -> list[Group]:
        return [group async for group in scheduler.groups()]

    [group], _ = run_virtual(every())
    assert not group.rollouts and {rollout.outcome.kind for rollout in group.failed} == {"judge_failed"}
    failure = group.failed[0].outcome.failure
    assert failure is not None and failure.error == "JudgeError" and told in failure.message


def test_what_is_right_passes() -> None:
    change = says(per_turn=(0.5, 0.25), states=("a", None), parts={"right": True, "short": 2}, success=None)
    score = finished("score", change).score
    assert score is not None and score.per_turn == (0.5, 0.25) and score.parts == {"right": True, "short": 2}
