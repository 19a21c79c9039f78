"""An environment whose infrastructure is down, on a virtual clock: no rollout is tried but one at a time, nothing is
lost when it comes back in time, and otherwise the run ends by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count, pairwise

import pytest
from fates import EmptyBox, FatedBoxes, FatedWorld, Fates, Stack, make_stack
from virtual import on_virtual_clock

from sparring.errors import EngineError, InfraError, JudgeError, Outage, SandboxError, TaskError, ToolHostError
from sparring.harness.chat import ChatHarness
from sparring.observe.metrics import Metrics
from sparring.rollout.breaker import EMPTY_STEPS, FEWEST_FAILURES, Breaker, EmptySteps
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.tasks.repetition import LostTasksAgain
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyTasks, toy_renderer, toy_script
from sparring.types import BoxSpec, Group, Task


class Boxed(ToyTasks):
    """Sums that are done in a box."""

    def next(self) -> Task | None:
        task = super().next()
        return None if task is None else replace(task, box=BoxSpec())


def now() -> float:
    return asyncio.get_running_loop().time()


def dead(begin_s: float, end_s: float, knocks: list[float]) -> Fates:
    """Boxes that cannot be had between two times."""

    def take(number: int) -> SandboxError | None:
        knocks.append(now())
        return SandboxError("sandbox: gone") if begin_s <= now() < end_s else None

    return Fates(take=take)


def scheduled(stack: Stack, steps: int, *, groups_per_step: int = 4, again: int = 0) -> Scheduler:
    source = LostTasksAgain(Boxed("train", None), again)
    window = Window(groups_per_step, steps, steps)  # so wide that nothing has to be released
    return Scheduler(stack.runner, source, window, run_seed=0, engine_version=lambda: 0)


async def collected(groups: AsyncIterator[Group]) -> list[Group]:
    return [group async for group in groups]


def test_nothing_is_lost_in_an_outage_that_ends_in_time() -> None:
    knocks: list[float] = []
    stack = make_stack(dead(3.0, 200.0, knocks), group_size=4, max_concurrent_rollouts=32, outage_s=300)
    scheduler = scheduled(stack, 12)
    groups, _ = run_virtual(collected(scheduler.groups()))
    assert len(groups) == 48 and all(len(group.rollouts) == 4 for group in groups)
    during = [at for at in knocks if 3.0 <= at < 200.0]
    assert len(during) < 32 + 32 + 12, "at most what was in flight when it struck, its first retries, and the probes"
    values = scheduler.metrics()
    assert values["rollout/outages"] == 1 and 190 < values["rollout/outage_s"] < 240


def test_an_outage_that_does_not_end_ends_the_run_by_name() -> None:
    knocks: list[float] = []
    stack = make_stack(dead(3.0, 1e9, knocks), group_size=4, max_concurrent_rollouts=32, outage_s=300)

    async def main() -> list[Group]:
        groups = []
        with pytest.raises(Outage, match="environment toy: expected a rollout .* within 300 s, got sandbox: gone"):
            async for group in scheduled(stack, 100).groups():
                groups.append(group)
        assert len(asyncio.all_tasks()) == 1
        return groups

    groups, seconds = run_virtual(main())
    assert 300 <= seconds < 340 and all(group.rollouts for group in groups)
    assert stack.fates.open_boxes == 0


def test_an_environment_that_fails_often_is_not_paused() -> None:
    stack = make_stack(Fates(take=lambda number: SandboxError("gone") if number % 3 == 0 else None), group_size=4)
    scheduler = scheduled(stack, 12)
    run_virtual(collected(scheduler.groups()))
    assert "rollout/outages" not in scheduler.metrics()


class PoisonedBoxes(FatedBoxes):
    """Boxes of which those of one image always break."""

    async def take(self, spec: BoxSpec) -> EmptyBox:
        if spec.image == "poison":
            raise SandboxError("sandbox: it fell over")
        return await super().take(spec)


class Poisoned(ToyTasks):
    """Sums, of which number 1 asks for such a box."""

    def next(self) -> Task | None:
        task = super().next()
        return task and replace(task, box=BoxSpec(image="poison") if task.id == "train-1" else BoxSpec())


@pytest.mark.parametrize("again", [0, 1, 2])
def test_one_task_that_breaks_its_environment_is_lost_alone_and_comes_again(again: int) -> None:
    """However small the run: here it is all that is in flight."""
    stack = make_stack(group_size=2, max_concurrent_rollouts=2)
    boxes = PoisonedBoxes(stack.fates)
    runner = RolloutRunner(FatedWorld(stack.fates), boxes, stack.recorder, ChatHarness(), stack.config)
    source = LostTasksAgain(Poisoned("train", None), again)
    scheduler = Scheduler(runner, source, Window(1, 9, 8), run_seed=0, engine_version=lambda: 0)
    groups, _ = run_virtual(collected(scheduler.groups()))
    assert [group.index for group in groups] == list(range(8))
    lost = [group for group in groups if not group.rollouts]
    assert [group.task.id for group in lost] == ["train-1"] * (1 + again)
    assert "rollout/outages" not in scheduler.metrics()


def test_probes_are_one_at_a_time_and_rarer_and_rarer() -> None:
    knocks: list[float] = []
    stack = make_stack(dead(0.0, 100.0, knocks), group_size=4, max_concurrent_rollouts=16, rebuilds=2)
    run_virtual(collected(scheduled(stack, 2).groups()))
    probes = [at for at in knocks if 1.0 < at <= 130.0]
    gaps = [later - earlier for earlier, later in pairwise(probes) if later < 100]
    assert gaps == sorted(gaps) and gaps[-1] == 30.0


def test_steps_without_any_rollout_are_told_and_end_the_run() -> None:
    told: list[str] = []
    steps = EmptySteps(2, told.append)
    task = Task(id="t", env="e", messages=())
    groups = (Group(id=str(index), index=index, task=task, rollouts=(), scores=()) for index in count())
    for _ in range(2 * (EMPTY_STEPS - 1)):
        steps.add(next(groups))
    assert [line.split(":")[0] for line in told] == ["step 1 trains on nothing", "step 2 trains on nothing"]
    steps.add(next(groups))
    with pytest.raises(Outage, match="steps 1 to 3: expected rollouts to train"):
        steps.add(next(groups))


@pytest.mark.parametrize("error", [JudgeError("judge: 503"), EngineError("engine: gone"), TaskError("no such image")])
@on_virtual_clock
async def test_what_is_no_failure_of_the_environment_opens_nothing(error: InfraError) -> None:
    breaker = Breaker("e", 60.0, lambda sentence: None, Metrics())
    for number in range(3 * FEWEST_FAILURES):
        async with breaker.trial(str(number)) as trial:
            trial.error = error
    assert not breaker.is_open


@on_virtual_clock
async def test_a_probe_that_is_cancelled_lets_another_probe() -> None:
    breaker = Breaker("e", 60.0, lambda sentence: None, Metrics())

    async def tried(task: str, error: InfraError | None) -> None:
        async with breaker.trial(task) as trial:
            trial.error = error

    for number in range(FEWEST_FAILURES):
        await tried(str(number % 2), SandboxError("gone"))
    assert breaker.is_open
    cancelled = asyncio.ensure_future(tried("a", None))
    waiting = asyncio.ensure_future(tried("b", None))
    await asyncio.sleep(0.5)
    cancelled.cancel()
    await waiting
    assert not breaker.is_open


@pytest.mark.parametrize("phase", ["take", "step"])
def test_an_outage_ends_when_what_broke_is_answered_and_not_when_the_probes_rollout_ends(phase: str) -> None:
    """A turn takes ten minutes here. Nobody waits for those of the probe."""
    knocks: list[float] = []

    def broken(number: int) -> InfraError | None:
        knocks.append(now())
        return None if now() >= until_s else SandboxError("sandbox: gone") if phase == "take" else ToolHostError("503")

    until_s = 100.0 if phase == "take" else 700.0
    slow = ScriptedEngine(toy_script(toy_renderer()), latency_s=600.0)
    stack = make_stack(Fates(**{phase: broken}), engine=slow, group_size=4, max_concurrent_rollouts=16, outage_s=900)
    scheduler = scheduled(stack, 1)
    groups, _ = run_virtual(collected(scheduler.groups()))
    assert all(len(group.rollouts) == 4 for group in groups)
    first = min(at for at in knocks if at >= until_s)
    assert sum(first <= at < first + 1.0 for at in knocks) >= 15, "all others go on at once"
    assert scheduler.metrics()["rollout/outages"] == 1


@pytest.mark.parametrize("call", [("open", ""), ("step", "policy"), None])
@on_virtual_clock
async def test_a_probe_is_answered_by_a_call_of_the_kind_that_broke(call: tuple[str, ...] | None) -> None:
    """Another kind proves nothing, and where nobody knows what broke, the whole attempt has to come to its end. A probe
    that ended the outage counts as any other attempt afterwards."""
    breaker = Breaker("e", 60.0, lambda sentence: None, Metrics())
    for number in range(FEWEST_FAILURES):
        async with breaker.trial(str(number % 2)) as trial:
            trial.error, trial.broken = ToolHostError("503"), call
    async with breaker.trial("probe") as trial:
        trial.answered(("step", "policy", "search"))
        assert breaker.is_open
        trial.answered(("step", "policy"))
        assert breaker.is_open == (call != ("step", "policy"))
        if not breaker.is_open:
            trial.error = ToolHostError("503")
    assert not breaker.is_open
    async with asyncio.timeout(0.1), breaker.trial("next"):
        pass
