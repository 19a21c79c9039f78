"""A second pass over a group that fails is a judge that failed, never the end of the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fates import EmptyBox, FatedBoxes, Fates, make_stack

from sparring.rollout.evaluate import ScoredRunner
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyWorld, toy_task
from sparring.types import BoxSpec, Group, Rollout, Score, Task

Answer = Callable[[Sequence[Score]], Any]


class Judge:
    """Answers as it is told, from the n-th time it is asked on rightly."""

    def __init__(self, answer: Answer, rightly_from: int = 1000) -> None:
        self._answer, self._rightly_from = answer, rightly_from
        self.asked = 0

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Any:
        """Answer."""
        self.asked += 1
        if self.asked > self._rightly_from:
            return list(scores)
        answer = self._answer(scores)
        return await answer if asyncio.iscoroutine(answer) else answer


def raised(error: BaseException) -> Answer:
    """Raise it."""

    def answer(scores: Sequence[Score]) -> Any:
        raise error

    return answer


async def hang() -> None:
    """Hang."""
    await asyncio.sleep(1e9)


async def hang_through_cancellation() -> None:
    """Ignore the first cancellation."""
    try:
        await hang()
    except asyncio.CancelledError:
        await hang()


ANSWERS: dict[str, tuple[Answer, str]] = {
    "too few": (lambda scores: scores[1:], "expected 3 scores"),
    "None": (lambda scores: None, "expected a list of scores"),
    "None in the list": (lambda scores: [None, *scores[1:]], "expected a Score at place 0"),
    "numbers": (lambda scores: [1.0, 2.0, 3.0], "expected a Score or None"),
    "nan": (lambda scores: [replace(score, reward=math.nan) for score in scores], "finite number as reward"),
    "text": (lambda scores: "abc", "expected a list of scores"),
    "raises": (raised(KeyError("row")), "KeyError: 'row'"),
    "cancels itself": (raised(asyncio.CancelledError()), "its own code was cancelled"),
    "hangs": (lambda scores: hang(), "no score after 120 s (rollout.timeouts.score_s)"),
    "ignores cancellation": (lambda scores: hang_through_cancellation(), "no score after 120 s"),
}


def groups_of(judge: Judge) -> list[Group]:
    """Two groups that are scored so."""
    stack = make_stack(group_size=3)
    window = Window(1, 1, 2)
    source = ToyWorld().tasks("train", 0)
    scheduler = Scheduler(stack.runner, source, window, run_seed=5, engine_version=lambda: 0, scorers=[judge])

    async def main() -> list[Group]:
        return [group async for group in scheduler.groups()]

    return run_virtual(main())[0]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_scorer_that_fails_takes_its_group_out(name: str) -> None:
    answer, message = ANSWERS[name]
    judge = Judge(answer)
    groups = groups_of(judge)
    assert len(groups) == 2 and judge.asked == 8
    for group in groups:
        assert group.rollouts == () and len(group.failed) == 3
        for rollout in group.failed:
            failure = rollout.outcome.failure
            assert rollout.outcome.kind == "judge_failed" and failure is not None and message in failure.message


@pytest.mark.parametrize("name", ANSWERS)
def test_a_scorer_that_fails_once_is_asked_again_and_nothing_is_sampled_again(name: str) -> None:
    judge = Judge(ANSWERS[name][0], rightly_from=1)
    first, second = groups_of(judge)
    assert judge.asked == 3 and len(first.rollouts) == len(second.rollouts) == 3 and first.failed == ()


@pytest.mark.parametrize("name", ["too few", "nan", "hangs"])
def test_an_evaluation_loses_what_its_scorer_fails(name: str) -> None:
    runner = ScoredRunner(make_stack().runner, [Judge(ANSWERS[name][0] if name != "too few" else lambda scores: [])])
    done = run_virtual(runner.run(toy_task(), rollout_id="eval/0", index=0, seed=1))[0]
    assert done.score is None and done.rollout.outcome.kind == "judge_failed"


class SpoiltBox(EmptyBox):
    """A box whose closing goes wrong."""

    def __init__(self, fates: Fates, error: BaseException) -> None:
        super().__init__(fates)
        self._error = error

    async def close(self) -> None:
        """Raise."""
        await super().close()
        raise self._error


class SpoiltBoxes(FatedBoxes):
    """A pool of such."""

    def __init__(self, fates: Fates, error: BaseException) -> None:
        super().__init__(fates)
        self._error = error

    async def take(self, spec: BoxSpec) -> EmptyBox:
        self._fates.open_boxes += 1
        return SpoiltBox(self._fates, self._error)


@pytest.mark.parametrize("error", [OSError("broken pipe"), asyncio.CancelledError(), TimeoutError(), AssertionError()])
def test_a_box_that_does_not_close_changes_no_outcome(error: BaseException) -> None:
    stack = make_stack()
    boxes = SpoiltBoxes(stack.fates, error)
    runner = RolloutRunner(ToyWorld(), boxes, stack.recorder, stack.runner.harness, stack.config)
    task = replace(toy_task(), box=BoxSpec())
    done = run_virtual(runner.run(task, rollout_id="rl/0/0", index=0, seed=1))[0]
    assert done.score is not None and done.score.reward == 1.0
    (failure,) = runner.close_failures
    assert type(failure).__name__ == "SandboxError" and type(error).__name__ in str(failure)
    assert stack.fates.open_boxes == 0 and stack.engine.held == {}
