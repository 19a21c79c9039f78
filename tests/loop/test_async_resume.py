"""An asynchronous run that dies at any commit, and goes on from its log: nothing lost, nothing doubled, the same
weights. The engine is scripted and the weights are a digest of what was trained; everything else is the real thing, on
a virtual clock."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from stored import sql

from sparring.errors import BadInput, SandboxError, SparringError
from sparring.generation import Completion, GenerateRequest
from sparring.harness.chat import ChatHarness
from sparring.log import step_name
from sparring.protocols import Store, TaskSource
from sparring.record.recorder import Recorder
from sparring.rollout.config import RetriesConfig, RolloutConfig
from sparring.rollout.group_log import GroupLog
from sparring.rollout.journal import Journals
from sparring.rollout.resample import prompt_of
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.stages.runtime.versions import VersionLog
from sparring.store.sqlite import SqliteStore
from sparring.tasks.pools import DifficultyPools
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyTasks, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import CheckpointRef, Group, Message, Observation, Outcome, Task, Trajectory, WeightRef

NOTHING = WeightRef(model="policy", version=0, checksum="", transport="", location=None)
STEPS, GROUPS, SIZE, MAX_LAG, EVERY = 6, 2, 2, 2, 2
WRITES = ("append_turns", "record", "append", "metric", "checkpoint", "truncate", "forget", "put", "event", "supersede")


class Killed(KeyboardInterrupt):
    """The process is gone: an event loop lets nothing catch it."""


class MortalStore:
    """A store whose process dies before its n-th commit. Nothing that it is told afterwards is written.

    Args:
        store: the real one.
        commits: so many are made; None lives on.
    """

    def __init__(self, store: SqliteStore, commits: int | None) -> None:
        self._store = store
        self._left = commits
        self.commits = 0
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in WRITES:
            return method

        def write(*arguments: Any, **named: Any) -> Any:
            if self.dead:
                return None
            if self._left is not None and self.commits >= self._left:
                self.dead = True
                raise Killed
            self.commits += 1
            return method(*arguments, **named)

        return write


class FewTasks(ToyTasks):
    """Seven sums over and over, so that pools have something to pass over. Which one comes next depends on how many
    groups were shown, so that another order of asking and showing gives other tasks.

    Args:
        changed: ask for another sum in the place of the fifth.
    """

    def __init__(self, changed: bool = False) -> None:
        super().__init__("train", None)
        self.changed = changed
        self.shown = 0

    def next(self) -> Task | None:
        """The next sum."""
        number = super().state()["next"]
        super().next()
        return toy_task(99 if self.changed and number == 4 else (number + 3 * self.shown) % 7)

    def observe(self, group: Group) -> None:
        """Count it."""
        self.shown += 1

    def state(self) -> Mapping[str, Any]:
        """Position and count."""
        return {**super().state(), "shown": self.shown}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().restore(state)
        self.shown = state["shown"]


class SlowWorld(ToyWorld):
    """Answers take from 0 to 40 seconds, and one in twenty breaks; which ones depends on the life."""

    def __init__(self, life: int) -> None:
        self.chance = random.Random(life)

    def make(self) -> ToyEnv:
        """A fresh world."""
        chance = self.chance

        class SlowEnv(ToyEnv):
            async def step(self, reply: Message) -> Observation:
                await asyncio.sleep(chance.random() * 40)
                if chance.random() < 0.05:
                    raise SandboxError(f"box: gone, {chance.random()}")
                return await super().step(reply)

        return SlowEnv()


@dataclass
class Ledger:
    """What all lives together did."""

    weights: dict[int, str] = field(default_factory=dict)
    trained: dict[int, list[str]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    finished: set[str] = field(default_factory=set)
    durable: set[tuple[tuple[int, ...], int]] = field(default_factory=set)
    again: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    redo: int = 0
    rebuilt: float = 0.0
    commits: int = 0


class CountingEngine(ScriptedEngine):
    """Counts requests of rollouts whose outcome is recorded: there must be none. No turn that is durable is asked for
    again."""

    ledger: Ledger

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample."""
        self.ledger.asked[request.id.partition("#")[0].partition("/retry")[0]] += 1
        if (request.tokens, request.sampling.seed) in self.ledger.durable:
            self.ledger.again.append(request.id)
        if self.version < self.ledger.redo:
            self.ledger.early.append(request.id)
        return await super().generate(request)


class Life:
    """A process of the run: wired as `stages/runtime/online.py` does it, with a digest in the place of a trainer."""

    def __init__(
        self,
        store: MortalStore,
        folder: Path,
        ledger: Ledger,
        number: int,
        changed: bool = False,
        steps: int = STEPS,
    ) -> None:
        held: Any = store
        self.store: Store = held
        self.mortal, self.folder, self.ledger = store, folder, ledger
        settings = RolloutConfig(
            group_size=SIZE, max_lag=MAX_LAG, max_concurrent_rollouts=5, retries=RetriesConfig(rebuilds=2)
        )
        self.engine = CountingEngine(toy_script(toy_renderer(), errors_in_ten=4), latency_s=1.0)
        self.engine.ledger = ledger
        recorder = Recorder(self.engine, toy_renderer(), self.store, sampling=settings.sampling.build())
        boxes = BubblewrapBoxes(SandboxConfig(enabled=False))
        attempts = Journals(self.store)
        runner = RolloutRunner(SlowWorld(number), boxes, recorder, ChatHarness(), settings, log=attempts)
        self.window = Window(GROUPS, MAX_LAG, steps)
        self.source: TaskSource = DifficultyPools(keep_easy=0.3, keep_hard=0.5).open(FewTasks(changed), seed=3)
        self.log = GroupLog(self.store)
        self.versions = VersionLog(self.store, "rl")
        self.weights = "fresh"
        self.measured: set[int] = set()
        self.scheduler = Scheduler(
            runner,
            self.source,
            self.window,
            run_seed=5,
            engine_version=lambda: self.engine.version,
            log=self.log,
        )

    def restore(self) -> int:
        """Go back to the last checkpoint; the number of its step."""
        found = self.store.last_checkpoint("rl")
        done = 0 if found is None else found[0].step
        trained = self.log.last_published(done)
        self.store.truncate("rl", trained)
        if found is not None:
            self.weights = found[1]["weights"]
            self.scheduler.restore(found[1]["scheduler"])
        self.scheduler.resume(trained)
        self.ledger.redo = trained
        self.measured = {step for step, _ in self.store.metrics("rl", after=done)}
        return done

    async def run(self) -> None:
        """Train from the last checkpoint to the end."""
        done = self.restore()
        if done:
            await self.publish(done)
        taken: list[Group] = []
        async for group in self.scheduler.groups():
            taken.append(group)
            if len(taken) == GROUPS:
                done += 1
                await self.train(done, taken)
                taken = []
                await asyncio.sleep(0)

    async def train(self, step: int, groups: list[Group]) -> None:
        """One step: as `run_loop` and its `after_step`."""
        ids = [group.id for group in groups]
        self.log.train(step, ids)
        assert self.ledger.trained.setdefault(step, ids) == ids
        self.weights = xxhash.xxh3_64_hexdigest(f"{self.weights}{groups}".encode())
        await asyncio.sleep(15)
        await self.publish(step)
        self.window.release(step)
        metrics = self.scheduler.metrics()
        lag = metrics["rollout/lag_max"]
        self.ledger.rebuilt += metrics.get("rollout/rebuilt", 0.0)
        assert metrics.get("rollout/started_over", 0.0) == 0
        if step not in self.measured:
            self.store.metric("rl", step, {"lag": lag})
        if step % EVERY == 0:
            folder = self.folder / f"step-{step}"
            folder.mkdir(exist_ok=True)
            state = {"weights": self.weights, "scheduler": self.scheduler.state(step)}
            self.store.checkpoint(CheckpointRef(model="policy", stage="rl", step=step, path=str(folder)), state)

    async def publish(self, step: int) -> None:
        """Let the engine serve the weights of a step; every life must make the same."""
        ref = WeightRef(model="policy", version=step, checksum=self.weights, transport="", location=None)
        self.versions.publish(ref)
        if not self.mortal.dead:
            assert self.ledger.weights.setdefault(step, self.weights) == self.weights
        await self.engine.pull(ref)


def lives(folder: Path, ledger: Ledger, deaths: list[int]) -> dict[str, Any]:
    """Run to the end through these deaths, each so many commits after the birth; the state of the source at the end."""
    for number, commits in enumerate([*deaths, None]):
        store = SqliteStore(folder / "store.sqlite")
        try:
            ledger.finished = {entry.name for _, entry in store.entries("rl", kinds=["outcome"])}
            ledger.asked.clear()
            ledger.durable = durable(store)
            mortal = MortalStore(store, commits)
            life = Life(mortal, folder, ledger, number)
            with suppress(Killed):
                run_virtual(life.run())
            ledger.commits = mortal.commits
            assert not ledger.finished & set(ledger.asked), "a finished rollout is not sampled again"
            assert not ledger.again, "nor is a finished turn"
            assert not ledger.early, "nothing is sampled before all recorded steps are trained again"
            if not mortal.dead:
                check(store, folder, ledger)
                return dict(life.source.state())
        finally:
            store.close()
    raise AssertionError("it never ended")


def durable(store: SqliteStore) -> set[tuple[tuple[int, ...], int]]:
    """Prompt and seed of every turn of a rollout that is not in a group."""
    turns = set()
    for name in store.trajectories("rl"):
        segments = store.turns(name)
        outcome = Outcome(kind="completed", reason="answered")
        trajectory = Trajectory(id=name, task="", role="policy", segments=tuple(segments), outcome=outcome)
        turns |= {(prompt_of(trajectory, s), s.sampling.seed) for s in segments if s.sampling is not None}
    return turns


def check(store: SqliteStore, folder: Path, ledger: Ledger) -> None:
    """Nothing lost, nothing doubled, no group too old, and the source as the log says."""
    groups = list(store.groups(stage="rl"))
    assert [group.index for group in groups] == list(range(STEPS * GROUPS))
    assert [ledger.trained[step] for step in range(1, STEPS + 1)] == [
        [group.id for group in groups[at : at + GROUPS]] for at in range(0, len(groups), GROUPS)
    ]
    assert all(0 <= group.index // GROUPS - group.version <= MAX_LAG for group in groups)
    admissions = [entry for _, entry in store.entries("rl", kinds=["admitted"])]
    assert [entry.name for entry in admissions] == [group.id for group in groups]
    outcomes = Counter(entry.name for _, entry in store.entries("rl", kinds=["outcome"]))
    assert set(outcomes.values()) == {1} and len(outcomes) == STEPS * GROUPS * SIZE, "each rollout ends once"
    source = DifficultyPools(keep_easy=0.3, keep_hard=0.5).open(FewTasks(), seed=3)
    observed = 0
    for entry, group in zip(admissions, groups, strict=True):
        for seen in groups[observed : entry.data["observed"]]:
            source.observe(seen)
        observed = entry.data["observed"]
        assert source.next() == group.task
        sampled = [r.id.partition("/retry")[0].partition("/broken")[0] for r in (*group.rollouts, *group.failed)]
        assert set(sampled) == {f"{group.id}/{place}" for place in range(SIZE)}
        assert len({r.id for r in (*group.rollouts, *group.failed)}) == len(sampled)
    assert [step for step, _ in store.metrics("rl")] == list(range(1, STEPS + 1))
    assert not sql(folder, "SELECT rollout FROM turns WHERE rollout LIKE 'rl/%'"), "every turn is in a group"


def long_run(folder: Path, steps: int) -> None:
    """A run that was killed behind step `steps`, three steps after its last checkpoint: its steps are the last of a
    real one, over and over."""
    whole = folder / "whole"
    whole.mkdir()
    lives(whole, Ledger(), [])
    with closing(SqliteStore(whole / "store.sqlite")) as store:
        groups = list(store.groups(stage="rl"))
    source = DifficultyPools(keep_easy=0.3, keep_hard=0.5).open(FewTasks(), seed=3)
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        log, versions = GroupLog(store), VersionLog(store, "rl")
        for step in range(1, steps + 1):
            first = (step - 1) * GROUPS
            if step == steps - 2:
                snapshot = {"step": step - 1, "first_group": first, "observed": first}
                state = {"weights": "", "scheduler": {**snapshot, "source": source.state()}}
                ref = CheckpointRef(model="policy", stage="rl", step=step - 1, path=str(folder))
                store.checkpoint(ref, state)
            taken = []
            for index in range(first, first + GROUPS):
                task = source.next()
                assert task is not None
                log.admit(index, task, version=step - 1, observed=index)
                group = replace(groups[index % len(groups)], id=f"rl/{index}", index=index, task=task, version=step - 1)
                source.observe(group)
                taken.append(group)
            store.append(*taken, stage="rl")
            log.train(step, [group.id for group in taken])
            versions.publish(WeightRef(model="policy", version=step, checksum="", transport="", location=None))
            store.metric("rl", step, {f"metric/{number}": float(step) for number in range(40)})


def bytes_read() -> int:
    """What this process has read so far, also from the kernel's cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def resumed(folder: Path, steps: int) -> tuple[int, float]:
    """Bytes that a resume of that run reads up to its first new group, and seconds."""
    before, started = bytes_read(), time.perf_counter()
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        life = Life(MortalStore(store, None), folder, Ledger(), 0, steps=steps + 2)
        done = life.restore()

        async def redo() -> None:
            await life.engine.pull(replace(NOTHING, version=done))
            taken = 0
            async for group in life.scheduler.groups():
                taken += 1
                if group.index == steps * GROUPS:
                    return
                if taken % GROUPS == 0:
                    life.log.train(step := done + taken // GROUPS, [f"rl/{group.index - 1}", group.id])
                    await life.engine.pull(replace(NOTHING, version=step))
                    life.window.release(step)

        run_virtual(redo())
        return bytes_read() - before, time.perf_counter() - started


def test_a_resume_reads_no_more_of_a_longer_run(tmp_path: Path) -> None:
    sizes = []
    for steps in (60, 600):
        folder = tmp_path / str(steps)
        folder.mkdir()
        long_run(folder, steps)
        sizes.append(resumed(folder, steps)[0])
    assert sizes[1] < 1.5 * sizes[0], "only trees are deeper"


@pytest.mark.slow
def test_a_resume_at_step_10000_reads_less_than_a_hundredth(tmp_path: Path) -> None:
    long_run(tmp_path, 10_000)
    size = (tmp_path / "store.sqlite").stat().st_size
    read, seconds = resumed(tmp_path, 10_000)
    print(f"{read} of {size} bytes, {seconds:.2f} s")
    assert read < size / 100


@pytest.fixture(scope="module")
def num_commits(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Commits of the run that nobody kills."""
    ledger = Ledger()
    lives(tmp_path_factory.mktemp("whole"), ledger, [])
    return ledger.commits


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_dies_at_random_commits_goes_on_to_the_same_weights(
    tmp_path: Path, num_commits: int, seed: int
) -> None:
    chance = random.Random(seed)
    deaths = [chance.randrange(num_commits * 2 // 3) for _ in range(5)]
    ledger = Ledger()
    lives(tmp_path, ledger, deaths)
    assert ledger.rebuilt > 0


@pytest.mark.kills
@pytest.mark.slow
@pytest.mark.parametrize("first", range(10))
def test_a_run_dies_at_every_commit(tmp_path: Path, num_commits: int, first: int) -> None:
    """Each time once, and once more while it does again what it had done."""
    chance = random.Random(first)
    for commits in range(first, num_commits, 10):
        folder = tmp_path / str(commits)
        folder.mkdir()
        lives(folder, Ledger(), [commits, chance.randrange(12), chance.randrange(num_commits)])


def killed(folder: Path, commits: int) -> SqliteStore:
    """The store of a run that died after so many commits."""
    store = SqliteStore(folder / "store.sqlite")
    with suppress(Killed):
        run_virtual(Life(MortalStore(store, commits), folder, Ledger(), 0).run())
    return store


def test_a_changed_data_file_is_refused_by_name(tmp_path: Path, num_commits: int) -> None:
    store = killed(tmp_path, num_commits // 2)
    life = Life(MortalStore(store, None), tmp_path, Ledger(), 1, changed=True)
    with pytest.raises(
        BadInput, match=r"group rl/\d+: expected task train-\d as it was when .*got task train-99; give"
    ):
        run_virtual(life.run())
    store.close()


def test_other_weights_in_the_redo_are_an_error_that_names_the_step(tmp_path: Path, num_commits: int) -> None:
    store = killed(tmp_path, num_commits - 1)
    life = Life(MortalStore(store, None), tmp_path, Ledger(), 1)
    done = life.restore()
    step = done + 1
    recorded = next(store.entries("rl", name=step_name("rl", step), kinds=["published"]))[1].data["checksum"]
    ref = WeightRef(model="policy", version=step, checksum="other", transport="", location=None)
    with pytest.raises(SparringError, match=rf"rl step {step}: expected the weights .* {recorded}, got other"):
        life.versions.publish(ref)
    store.close()


def test_the_tensor_that_differs_is_named(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    versions = VersionLog(store, "rl")

    def ref(checksum: str, digests: Mapping[str, int]) -> WeightRef:
        return WeightRef(
            model="policy", version=1, checksum=checksum, transport="", location=None, digests=dict(digests)
        )

    versions.publish(ref("a", {"head": 1, "layer.0": 2, "layer.1": 3}))
    versions.publish(ref("a", {"head": 1, "layer.0": 2, "layer.1": 3}))
    with pytest.raises(SparringError, match="got b, first in tensor layer.0; go on with"):
        versions.publish(ref("b", {"head": 1, "layer.1": 9, "layer.0": 8}))
    with pytest.raises(SparringError, match="got b, of 1 tensors where there were 3; go on with"):
        versions.publish(ref("b", {"head": 1}))
    store.close()
