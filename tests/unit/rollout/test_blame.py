"""Blame: a failure is the policy's only where the same call breaks in every world, and others' calls do not (law 6)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from fates import FatedBoxes, Fates

from sparring.errors import Outage, ToolHostError
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.rollout.blame import Place, Successes, WorldCalls
from sparring.rollout.config import RetriesConfig, RewardsConfig, RolloutConfig
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import Failure, Message, Observation, Outcome, Score, Task, Trajectory

FAILURE = Failure(error="ToolHostError", where="tool host", message="503")
CALL = ("step", "policy", "add")


def test_a_call_that_breaks_in_four_worlds_while_others_succeed_is_the_policys() -> None:
    successes = Successes()
    calls, others = WorldCalls(successes), WorldCalls(successes)
    place = Place(call=CALL, number=2)
    verdicts = []
    for _ in range(4):
        verdicts.append(calls.broke(place, FAILURE))
        others.succeeded(Place(call=CALL, number=0))
    assert verdicts == [False, False, False, True]


def test_worlds_that_break_before_others_succeeded_do_not_count() -> None:
    successes = Successes()
    calls, others = WorldCalls(successes), WorldCalls(successes)
    place = Place(call=CALL, number=2)
    verdicts = []
    for world in range(8):
        verdicts.append(calls.broke(place, FAILURE))
        if world % 2:
            others.succeeded(place)
    assert verdicts == [False] * 6 + [True, True]


@pytest.mark.parametrize("others_do", ["nothing", "another kind", "break", "succeed once"])
def test_where_others_do_not_succeed_since_the_world_before_it_is_not(others_do: str) -> None:
    successes = Successes()
    calls, others = WorldCalls(successes), WorldCalls(successes)
    place = Place(call=CALL, number=2)
    if others_do == "succeed once":
        others.succeeded(place)
    for _ in range(10):
        assert not calls.broke(place, FAILURE)
        if others_do != "break":
            calls.succeeded(Place(call=CALL, number=0))  # its own calls, on the way back, say nothing
        if others_do == "another kind":
            others.succeeded(Place(call=("step", "policy", "search"), number=0))
        elif others_do == "break":
            assert not others.broke(Place(call=CALL, number=0), FAILURE)


@pytest.mark.parametrize("change", ["answered", "another failure", "started over"])
def test_it_begins_anew_where_the_call_is_not_the_same_failure_of_the_same_replies(change: str) -> None:
    successes = Successes()
    calls, others = WorldCalls(successes), WorldCalls(successes)
    place = Place(call=CALL, number=2)
    for world in range(6):
        failure = replace(FAILURE, message="502") if change == "another failure" and world == 3 else FAILURE
        assert not calls.broke(place, failure)
        others.succeeded(place)
        if world == 2 and change == "answered":
            calls.succeeded(place)
        elif world == 2 and change == "started over":
            calls.forget()


def fakes(*, calls_a_rollout: int, share: float, old_rule: bool, rollouts: int = 20_000) -> float:
    """The share of rollouts that a rule calls the policy's, where calls fail alone under one message."""
    draw = random.Random(7)
    successes, num_fakes = Successes(), 0
    neighbour = WorldCalls(successes)
    for _ in range(rollouts):
        calls, furthest, failures = WorldCalls(successes), 0, 0
        for _ in range(12):
            broken = next((n for n in range(calls_a_rollout) if draw.random() < share), None)
            for number in range(calls_a_rollout if broken is None else broken):
                calls.succeeded(Place(call=CALL, number=number))
            if broken is None:
                break
            failures += 1
            if broken >= furthest and calls.broke(Place(call=CALL, number=broken), FAILURE) and not old_rule:
                num_fakes += 1
                break
            furthest = max(furthest, broken)
            neighbour.succeeded(Place(call=CALL, number=0))
            if old_rule and failures == 2:
                num_fakes += 1
                break
    return num_fakes / rollouts


def test_where_15_percent_of_calls_fail_alone_the_old_rule_makes_fake_zeros_and_this_does_not() -> None:
    """The old rule: a second world that breaks under the same message. With three calls a rollout that is
    (1 - 0.85 ** 3) ** 2 = 15 % of them; four worlds that break at the same call are 3 * 0.15 ** 4 = 0.15 %."""
    old = fakes(calls_a_rollout=3, share=0.15, old_rule=True)
    new = fakes(calls_a_rollout=3, share=0.15, old_rule=False)
    assert 0.13 < old < 0.16 and new <= 0.002


class Fragile(ToyEnv):
    """A world that dies of one task's call, or of its answer when that is scored."""

    def __init__(self, where: str, deadly: int, down: bool) -> None:
        super().__init__()
        self.where, self.deadly, self.down = where, deadly, down

    def _meet(self, where: str) -> None:
        if where == self.where and self._task is not None and (self.down or self._task.seed == self.deadly):
            raise ToolHostError("tool host: 503")

    async def step(self, reply: Message) -> Observation:
        """Die of the deadly call."""
        await asyncio.sleep(0.1)
        self._meet("step")
        return await super().step(reply)

    async def score(self, trajectory: Trajectory) -> Score | None:
        """Die of the deadly answer."""
        self._meet("score")
        return await super().score(trajectory)


class FragileWorld(ToyWorld):
    """Makes fragile worlds; those of a host that is `down` all break."""

    def __init__(self, where: str, down: bool = False) -> None:
        self.where, self.down = where, down

    def make(self) -> Fragile:
        """A fresh one."""
        return Fragile(self.where, 0, self.down)


def side_by_side(world: ToyWorld, retries: int = 3) -> list[Finished]:
    """The deadly task beside forty others, ten at a time."""
    config = RolloutConfig(retries=RetriesConfig(rebuilds=retries), rewards=RewardsConfig(policy_failure=-0.5))
    engine = ScriptedEngine(toy_script(toy_renderer()), latency_s=0.2)
    recorder = Recorder(engine, toy_renderer(), sampling=config.sampling.build())
    runner = RolloutRunner(world, FatedBoxes(Fates()), recorder, ChatHarness(), config)
    places = asyncio.Semaphore(5)

    async def run(task: Task) -> Finished:
        async with places:
            return await runner.run(task, rollout_id=f"rl/{task.seed}/0", index=0, seed=1)

    async def main() -> list[Finished]:
        rollouts = [asyncio.create_task(run(toy_task(number))) for number in range(41)]
        done, pending = await asyncio.wait(rollouts, return_when=asyncio.FIRST_EXCEPTION)
        for rollout in pending:
            rollout.cancel()
        assert all(isinstance(rollout.exception(), Outage | None) for rollout in done)
        return [rollout.result() for rollout in rollouts if rollout in done and rollout.exception() is None]

    return run_virtual(main())[0]


@pytest.mark.parametrize("where", ["step", "score"])
def test_a_world_that_dies_of_one_policys_call_alone_is_that_policys_failure(where: str) -> None:
    deadly, *others = side_by_side(FragileWorld(where), retries=8)
    failure = Failure(error="ToolHostError", where="tool host", message="503")
    assert deadly.rollout.outcome == Outcome(kind="policy_failed", reason="failure", failure=failure)
    assert deadly.score is not None and (deadly.score.reward, deadly.score.success) == (-0.5, False)
    assert [r.attempt for r in deadly.broken] == list(range(deadly.rollout.attempt)) and len(deadly.broken) >= 3
    assert all(done.score is not None and done.score.reward == 1.0 for done in others)
    assert side_by_side(FragileWorld(where), retries=2)[0].score is None


def test_a_tool_host_that_says_the_same_to_everybody_is_nobodys_failure() -> None:
    assert all(done.score is None for done in side_by_side(FragileWorld("step", down=True), retries=5))
