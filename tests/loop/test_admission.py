"""Tasks to groups on a virtual clock: order, lag, failures, resume. The engine is scripted, everything else is the real
thing."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import with_settings
from virtual import on_virtual_clock

from sparring.errors import JudgeError, Outage, SandboxError, SparringError, StoreError
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.rollout.config import RolloutConfig
from sparring.rollout.group_log import GroupLog
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window, check_window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyTasks, ToyWorld, toy_renderer, toy_script
from sparring.types import Group, Message, Observation, Rollout, Score, Task, Trajectory, WeightRef


class UnevenWorld(ToyWorld):
    """Every step of the world takes from 0 to 50 seconds, and some crash: by chance, but by the chance of `seed`
    alone."""

    def __init__(self, seed: int = 0, crash_in_ten: int = 0, error: type[Exception] = SandboxError) -> None:
        self.seed = seed
        self.crash_in_ten = crash_in_ten
        self.error = error
        self.steps = 0

    def make(self) -> UnevenEnv:
        """A fresh world."""
        return UnevenEnv(self)


class UnevenEnv(ToyEnv):
    """One of them."""

    def __init__(self, world: UnevenWorld) -> None:
        super().__init__()
        self._world = world

    async def step(self, reply: Message) -> Observation:
        """Take a while, then crash or answer."""
        self._world.steps += 1
        chance = xxhash.xxh3_64_intdigest(f"{self._world.seed}/{self._world.steps}".encode())
        await asyncio.sleep(chance % 50)
        if chance // 50 % 10 < self._world.crash_in_ten:
            raise self._world.error(f"world: crash {self._world.steps}")
        return await super().step(reply)


@dataclass
class Run:
    """A scheduler with the parts that a trainer would hold."""

    scheduler: Scheduler
    window: Window
    engine: ScriptedEngine
    runner: RolloutRunner
    source: ToyTasks

    async def steps(self, first: int, last: int, train_s: float = 7.0) -> list[list[Group]]:
        """Train steps `first` to `last`, both included, the way `run_loop` does."""
        done: list[list[Group]] = []
        groups = self.scheduler.groups()
        for step in range(first, last + 1):
            taken: list[Group] = []
            async for group in groups:
                taken.append(group)
                if len(taken) == self.window.groups_per_step:
                    break
            await asyncio.sleep(train_s)
            await self.engine.pull(WeightRef(model="policy", version=step, checksum="", transport="", location=None))
            self.window.release(step)
            done.append(taken)
        await self.scheduler.close()
        return done


def make_run(
    world: ToyWorld,
    *,
    groups_per_step: int = 3,
    total_steps: int | None = None,
    version: int = 0,
    scorer: Any = None,
    **config: Any,
) -> Run:
    """The toy stack behind a scheduler."""
    settings = with_settings(RolloutConfig(group_size=3, max_concurrent_rollouts=8), **config)
    check_window(settings, groups_per_step=groups_per_step)
    renderer = toy_renderer()
    engine = ScriptedEngine(toy_script(renderer, errors_in_ten=3), version=version, latency_s=1.0)
    recorder = Recorder(engine, renderer, sampling=settings.sampling.build())
    runner = RolloutRunner(world, BubblewrapBoxes(SandboxConfig(enabled=False)), recorder, ChatHarness(), settings)
    window = Window(groups_per_step, settings.max_lag, total_steps)
    source = world.tasks("train", 0)
    scheduler = Scheduler(
        runner,
        source,
        window,
        run_seed=5,
        engine_version=lambda: engine.version,
        scorers=[] if scorer is None else [scorer],
    )
    return Run(scheduler, window, engine, runner, source)


def tokens(rollout: Rollout) -> list[tuple[int, ...]]:
    """What the policy sampled."""
    return [s.tokens for t in rollout.trajectories for s in t.segments if s.model]


@settings(max_examples=20, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    group_size=st.integers(2, 4),
    max_lag=st.integers(0, 3),
    concurrency=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_no_deadlock_right_order_bounded_lag(
    groups_per_step: int, group_size: int, max_lag: int, concurrency: int, seed: int
) -> None:
    run = make_run(
        UnevenWorld(seed),
        groups_per_step=groups_per_step,
        total_steps=4,
        group_size=group_size,
        max_lag=max_lag,
        max_concurrent_rollouts=concurrency,
    )
    steps, seconds = run_virtual(run.steps(1, 4))
    groups = [group for step in steps for group in step]
    assert [g.index for g in groups] == list(range(4 * groups_per_step))
    assert [g.task.id for g in groups] == [f"train-{g.index}" for g in groups]
    for number, taken in enumerate(steps):
        for group in taken:
            assert 0 <= number - group.version <= max_lag
            assert [r.index for r in group.rollouts] == list(range(group_size))
            assert [r.id for r in group.rollouts] == [f"rl/{group.index}/{n}" for n in range(group_size)]
    assert run.engine.most_in_flight <= concurrency
    assert run.source.state() == {"next": 4 * groups_per_step}  # nothing was admitted that no step takes
    assert seconds < 4 * (7 + groups_per_step * group_size * 102)  # at worst one rollout after another


def test_groups_finish_out_of_order_and_leave_in_order() -> None:
    run = make_run(UnevenWorld(3), groups_per_step=6, max_concurrent_rollouts=100)
    ((taken,), _) = run_virtual(run.steps(1, 1))
    ends = [max(t.timing.wall_s for r in g.rollouts for t in r.trajectories) for g in taken]
    assert ends != sorted(ends)  # all started at once, so this is the order of completion
    assert [g.index for g in taken] == list(range(6))


def test_every_request_says_when_its_rollout_was_admitted() -> None:
    run = make_run(UnevenWorld(3), groups_per_step=6, max_concurrent_rollouts=100)
    run_virtual(run.steps(1, 1))
    requests = run.engine.requests
    assert {request.admission for request in requests} == set(range(6))
    assert all(request.id.startswith(f"rl/{request.admission}/") for request in requests)


def test_a_wider_window_overlaps_rollouts_with_training() -> None:
    _, synchronous = run_virtual(make_run(UnevenWorld(1), total_steps=6).steps(1, 6, train_s=60))
    _, ahead = run_virtual(make_run(UnevenWorld(1), total_steps=6, max_lag=2).steps(1, 6, train_s=60))
    assert synchronous > 6 * 60 + 100 and ahead < synchronous - 100


def test_the_lag_is_measured() -> None:
    run = make_run(UnevenWorld(1), max_lag=2, total_steps=6)
    run_virtual(run.steps(1, 6, train_s=200))
    values = run.scheduler.metrics()
    assert values["rollout/lag_max"] == 2 and 1 < values["rollout/lag_mean"] < 2
    assert values["rollout/groups"] == 18 and values["rollout/length_bias"] == 1.0
    assert run.scheduler.metrics() == {}


def test_a_step_released_before_its_weights_are_served_is_caught() -> None:
    run = make_run(ToyWorld())

    async def main() -> None:
        taken = 0
        async for _ in run.scheduler.groups():
            taken += 1
            if taken % 3 == 0:
                run.window.release(taken // 3)  # and no pull

    with pytest.raises(SparringError, match="rl/3: expected a lag of at most 0, got 1"):
        run_virtual(main())


def test_synchronous_rollouts_do_not_depend_on_time_or_concurrency() -> None:
    (one, _) = run_virtual(make_run(UnevenWorld(1), max_concurrent_rollouts=1).steps(1, 3))
    (two, _) = run_virtual(make_run(UnevenWorld(2), max_concurrent_rollouts=50).steps(1, 3))
    for a, b in zip(chain.from_iterable(one), chain.from_iterable(two), strict=True):
        assert [tokens(r) for r in a.rollouts] == [tokens(r) for r in b.rollouts]
        assert (a.scores, a.version, a.task) == (b.scores, b.version, b.task)


def test_infrastructure_failures_never_become_a_reward() -> None:
    clean, _ = run_virtual(make_run(ToyWorld()).steps(1, 4))
    run = make_run(UnevenWorld(9, 2), rebuilds=1)
    steps, _ = run_virtual(run.steps(1, 4))
    failed = 0
    for group, without in zip(chain.from_iterable(steps), chain.from_iterable(clean), strict=True):
        reward = {r.index: s for r, s in zip(without.rollouts, without.scores, strict=True)}
        attempts = {r.index: tokens(r) for r in without.rollouts}
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            assert score == reward[rollout.index] and tokens(rollout) == attempts[rollout.index]
        for rollout in group.failed:
            assert rollout.outcome.kind == "infra_failed"
            assert tokens(rollout) == attempts[rollout.index][: len(tokens(rollout))]
        failed += len(group.failed)
        present = {r.index for r in (*group.rollouts, *group.failed)}
        assert present == {0, 1, 2}
    values = run.scheduler.metrics()
    attempts_made = failed + sum(len(g.rollouts) for s in steps for g in s)
    assert failed > 0 and values["rollout/infra_failure_rate"] == failed / attempts_made


def test_a_world_that_always_fails_trains_no_step_and_ends_the_run() -> None:
    run = make_run(UnevenWorld(9, 10), rebuilds=1, outage_s=120)
    with pytest.raises(Outage, match="within 120 s, got world: crash"):
        run_virtual(run.steps(1, 4))
    assert run.window.released_steps == 0


@on_virtual_clock
async def test_a_dead_task_kills_the_run_at_once() -> None:
    run = make_run(UnevenWorld(9, 1, StoreError), max_lag=3, max_concurrent_rollouts=100)
    with pytest.raises(StoreError, match="crash"):
        await run.steps(1, 50)
    assert len(asyncio.all_tasks()) == 1 and run.engine.held == {}


def test_a_source_that_dies_kills_the_run() -> None:
    class Broken(ToyTasks):
        def next(self) -> Task | None:
            if self.state()["next"] == 4:
                raise OSError("the data file is gone")
            return super().next()

    run = make_run(ToyWorld())
    scheduler = Scheduler(run.runner, Broken("train", None), Window(3, 1), run_seed=5, engine_version=lambda: 0)

    async def main() -> list[int]:
        return [g.index async for g in scheduler.groups()]

    with pytest.raises(OSError, match="data file"):
        run_virtual(main())


def test_a_finite_source_ends_the_groups() -> None:
    run = make_run(ToyWorld(), groups_per_step=100)
    scheduler = Scheduler(run.runner, ToyTasks("train", 7), Window(100, 0), run_seed=5, engine_version=lambda: 0)

    async def main() -> list[int]:
        return [g.index async for g in scheduler.groups()]

    assert run_virtual(main())[0] == list(range(7))


class Ranks:
    """A scorer over whole groups: the first rollout wins, the last one cannot be judged."""

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Rewards by place."""
        return [Score(reward=1.0), *(Score(reward=0.0) for _ in rollouts[2:]), Score(reward=None)]


class SilentWorld(ToyWorld):
    """Leaves scoring to others."""

    def make(self) -> ToyEnv:
        """A fresh world."""

        class Silent(ToyEnv):
            async def score(self, trajectory: Trajectory) -> Score | None:
                return None

        return Silent()


def test_a_second_pass_scores_what_the_world_left_open() -> None:
    ((taken,), _) = run_virtual(make_run(SilentWorld(), scorer=Ranks()).steps(1, 1))
    assert len(taken) == 3
    for group in taken:
        assert [s.reward for s in group.scores] == [1.0, 0.0]
        assert [(r.index, r.outcome.kind) for r in group.failed] == [(2, "judge_failed")]


class Fallen:
    """A scorer that raises what it was made with."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """No scores."""
        raise self._error


@pytest.mark.parametrize("error", [JudgeError("judge: gone"), KeyError("gone")])
def test_a_second_pass_that_fails_is_no_reward(error: Exception) -> None:
    """The run goes on; the rollouts leave with what failed."""
    ((taken,), _) = run_virtual(make_run(ToyWorld(), scorer=Fallen(error)).steps(1, 1))
    assert len(taken) == 3
    for group in taken:
        assert not group.rollouts and len(group.failed) == 3
        assert {r.outcome.kind for r in group.failed} == {"judge_failed"}
        assert all("gone" in r.outcome.failure.message for r in group.failed if r.outcome.failure)


def test_what_nobody_scores_leaves_the_group() -> None:
    ((taken,), _) = run_virtual(make_run(SilentWorld()).steps(1, 1))
    assert len(taken) == 3 and all(not g.rollouts and len(g.failed) == 3 for g in taken)


class Curriculum(ToyTasks):
    """Counts what it was shown; tasks depend on it."""

    def __init__(self) -> None:
        super().__init__("train", None)
        self.shown: list[int] = []

    def observe(self, group: Group) -> None:
        """Remember."""
        self.shown.append(group.index)

    def state(self) -> Mapping[str, Any]:
        """Where the stream stands."""
        return {**super().state(), "shown": self.shown}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().restore(state)
        self.shown = list(state["shown"])


@settings(max_examples=8, deadline=None)
@given(kill_after=st.integers(1, 5), every=st.integers(1, 3), max_lag=st.integers(0, 2), seed=st.integers(0, 1000))
def test_resume_trains_every_task_exactly_once(kill_after: int, every: int, max_lag: int, seed: int) -> None:
    """Checkpoints every `every` steps, dies after step `kill_after`, and starts again from the last checkpoint."""
    folder = tempfile.TemporaryDirectory()

    def made(version: int, store: SqliteStore | None = None) -> tuple[Run, Curriculum]:
        run = make_run(UnevenWorld(seed), max_lag=max_lag, version=version, total_steps=7)
        source = Curriculum()
        run.scheduler = Scheduler(
            run.runner,
            source,
            run.window,
            run_seed=5,
            engine_version=lambda: run.engine.version,
            log=GroupLog(store),
        )
        return run, source

    async def first_life(store: SqliteStore) -> dict[str, Any] | None:
        run, _ = made(0, store)
        taken = 0
        saved: dict[str, Any] | None = None
        async for _ in run.scheduler.groups():
            taken += 1
            if taken % 3 == 0:
                step = taken // 3
                await asyncio.sleep(7)
                await run.engine.pull(WeightRef(model="policy", version=step, checksum="", transport="", location=None))
                run.window.release(step)
                if step % every == 0:
                    saved = run.scheduler.state(step)
                if step == kill_after:
                    break
        await run.scheduler.close()
        return saved

    with folder, closing(SqliteStore(f"{folder.name}/store.sqlite")) as store:
        saved = run_virtual(first_life(store))[0]
        begin = saved["step"] if saved else 0
        run, source = made(begin, store)
        if saved:
            run.scheduler.restore(saved)
        again, _ = run_virtual(run.steps(begin + 1, 7))
        everything = [*store.groups(stage="rl", end=begin * 3), *chain.from_iterable(again)]
        assert everything == list(store.groups(stage="rl"))
    assert [g.task.id for g in everything] == [f"train-{n}" for n in range(21)]
    assert [g.index for g in everything] == source.shown == list(range(21))
    if max_lag == 0:  # and in a synchronous run, on the same tokens
        whole, _ = run_virtual(made(0)[0].steps(1, 7))
        assert [[tokens(r) for r in g.rollouts] for g in everything] == [
            [tokens(r) for r in g.rollouts] for g in chain.from_iterable(whole)
        ]


def test_the_state_of_another_step_is_refused() -> None:
    run = make_run(ToyWorld())
    run_virtual(run.steps(1, 3))
    with pytest.raises(ValueError, match="no state of step 1"):
        run.scheduler.state(1)
