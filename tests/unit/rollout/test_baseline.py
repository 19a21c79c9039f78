"""A rollout of every task that the others are judged against, and that is no member of their group."""

from __future__ import annotations

from dataclasses import replace

from fates import FatedBoxes, FatedWorld, Fates, make_stack

from sparring.algo.credit.remax import Remax
from sparring.batch.flatten import flatten
from sparring.errors import SandboxError
from sparring.generation import NumberRow
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyTasks, toy_renderer, toy_script
from sparring.types import Group


def grouped(fates: Fates, *, errors_in_ten: int = 0) -> list[Group]:
    """Two groups of three whose policy errs, against a baseline that never does unless its world breaks."""
    stack = make_stack(engine=ScriptedEngine(toy_script(toy_renderer(), errors_in_ten=errors_in_ten)), group_size=3)
    greedy = replace(stack.config.sampling.build(), temperature=0.0)
    best = ScriptedEngine(toy_script(toy_renderer()))
    baseline = RolloutRunner(
        FatedWorld(fates),
        FatedBoxes(fates),
        Recorder(best, toy_renderer(), sampling=greedy),
        ChatHarness(),
        stack.config,
    )
    scheduler = Scheduler(
        stack.runner, ToyTasks("train", 2), Window(1, 1, 2), run_seed=5, engine_version=lambda: 0, baseline=baseline
    )

    async def taken() -> list[Group]:
        return [group async for group in scheduler.groups()]

    return run_virtual(taken())[0]


def test_its_score_stands_beside_the_group_and_no_rollout_among_its_members() -> None:
    groups = grouped(Fates(), errors_in_ten=10)
    assert len(groups) == 2
    for group in groups:
        assert [r.purpose for r in group.rollouts] == ["train"] * 3 and group.failed == ()
        assert [score.reward for score in group.baselines] == [1.0]
        assert [score.reward for score in group.scores] == [0.0] * 3
        rows = Remax().credit([group], [flatten(group, "policy")])[0]
        assert {value for row in rows for value in row.advantages or () if value} == {-1.0}


def test_one_that_breaks_is_among_the_failed() -> None:
    groups = grouped(Fates(open=lambda number: SandboxError(f"box: failure {number}")))
    assert len(groups) == 2
    for group in groups:
        assert group.baselines == () and len(group.rollouts) == 3
        assert {r.purpose for r in group.failed} == {"baseline"} and len(group.failed) >= 4
        assert Remax().credit([group], [flatten(group, "policy")]) == [[]]


def test_groups_that_wait_for_their_step_hold_rows_of_numbers() -> None:
    groups = grouped(Fates())
    rollouts = [rollout for group in groups for rollout in (*group.rollouts, *group.failed)]
    segments = [segment for rollout in rollouts for t in rollout.trajectories for segment in t.segments]
    assert {type(segment.tokens) for segment in segments} == {NumberRow}
    assert {type(segment.logprobs) for segment in segments if segment.model} == {NumberRow}
