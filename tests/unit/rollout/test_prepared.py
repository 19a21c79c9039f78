"""Boxes that a world prepares once: a retry's box is a fork of what the world had prepared, and the record stays exact.

The box holds what does not come again, as a clock would: a random word. A retry whose box is prepared anew is noticed
by the record and starts over; one in a fork goes on where it broke.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sparring.envs.base import Env
from sparring.envs.preparation import Preparation
from sparring.errors import SandboxError, ToolHostError
from sparring.harness.chat import ChatHarness
from sparring.record.recorder import Recorder
from sparring.rollout.blame import Place, Successes, WorldCalls
from sparring.rollout.config import RetriesConfig, RolloutConfig
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_script, toy_task
from sparring.types import BoxSpec, Failure, Message, Observation, Task

TASK = replace(toy_task(), box=BoxSpec(timeout_s=20.0))


@dataclass
class History:
    """What the worlds of a rollout did, and which of their calls break.

    Attributes:
        breaks: whether a world's step breaks, by the number of the step over all worlds.
        stops_at: number of the step at which the world stands still; 0: none.
    """

    breaks: Callable[[int], bool] = lambda number: False
    stops_at: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    prepared: int = 0
    opened: int = 0
    steps: int = 0
    seen: list[str] = field(default_factory=list)


class Prepared(ToyEnv):
    """A world that fills its box before it opens. The model is told a word of the box."""

    looks = "cat copy; ls; stat -c %y word"

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history
        self.box: Any = None

    async def prepare(self, task: Task, box: Any) -> None:
        self.history.prepared += 1
        await box.write("word", self.word().encode())
        assert (await box.exec("cat word > copy")).exit_code == 0

    def word(self) -> str:
        """A word that does not come again."""
        return secrets.token_hex(4)

    async def open(self, task: Task, box: Any) -> Observation:
        self.history.opened += 1
        self.box = box
        await super().open(task, box)
        return await self._told()

    async def _told(self) -> Observation:
        told = (await self.box.exec(self.looks)).stdout
        self.history.seen.append(told)
        return Observation(messages=(Message(role="user", content=told),))

    async def step(self, reply: Message) -> Observation:
        self.history.steps += 1
        assert (await self.box.exec("date >> log; rm -f copy")).exit_code == 0
        if self.history.steps == self.history.stops_at:
            self.history.stopped.set()
            await asyncio.Event().wait()
        if self.history.breaks(self.history.steps):
            raise ToolHostError("503")
        return await super().step(reply)


class InOpen(Prepared):
    """The same world, which fills its box when it opens: what its method did is in no snapshot."""

    prepare = None  # type: ignore[assignment]

    async def open(self, task: Task, box: Any) -> Observation:
        await Prepared.prepare(self, task, box)
        return await super().open(task, box)


class Always(Prepared):
    """A world whose box is the same whenever it is prepared, but for times."""

    looks = "cat copy; ls"

    def word(self) -> str:
        return "the same"


@dataclass
class Worlds(ToyWorld):
    """Makes the worlds of a test."""

    history: History
    world: type[Prepared] = Prepared

    def make(self) -> Prepared:
        return self.world(self.history)


class Bench:
    """Boxes, and a loop to play rollouts in."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.boxes = BubblewrapBoxes(SandboxConfig(servers=1))

    def run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    def play(
        self, history: History, world: type[Prepared] = Prepared, rebuilds: int = 3, store: SqliteStore | None = None
    ) -> tuple[Finished | None, dict[str, float], int]:
        """Return a rollout (None: its world stood still, and it was cancelled), its metrics and the number of requests
        to the engine."""
        engine = ScriptedEngine(toy_script(toy_renderer()))
        config = RolloutConfig(retries=RetriesConfig(rebuilds=rebuilds, delay_s=0.0))
        recorder = Recorder(engine, toy_renderer(), store, sampling=config.sampling.build())
        parts = (Worlds(history, world), self.boxes, recorder, ChatHarness(), config)
        runner = RolloutRunner(*parts, log=Journals(store))

        async def until_it_stops() -> Finished | None:
            playing = asyncio.create_task(runner.run(TASK, rollout_id="rl/0/0", index=0, seed=1))
            stopping = asyncio.create_task(history.stopped.wait())
            await asyncio.wait((playing, stopping), return_when=asyncio.FIRST_COMPLETED)
            done = playing.result() if playing.done() else None
            for task in (playing, stopping):
                task.cancel()
            await asyncio.gather(playing, stopping, return_exceptions=True)
            return done

        return self.run(until_it_stops()), runner.metrics(), len(engine.requests)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        bench = Bench(runner)
        yield bench
        runner.run(bench.boxes.close())


def sampled(finished: Finished) -> list[list[int]]:
    segments = finished.rollout.trajectories[0].segments
    return [list(segment.tokens) for segment in segments if segment.model is not None]


def tokens(finished: Finished) -> list[list[int]]:
    return [list(segment.tokens) for segment in finished.rollout.trajectories[0].segments]


def test_a_retry_goes_on_in_a_fork_of_what_the_world_prepared(bench: Bench) -> None:
    plain, _, requests = bench.play(History(), Always)
    assert plain is not None and plain.score is not None and plain.score.reward == 1.0
    finished, metrics, asked = bench.play(history := History(breaks=lambda number: number == 1))
    assert finished is not None and finished.score is not None and finished.score.reward == 1.0
    assert (history.prepared, history.opened, asked) == (1, 2, requests), "prepared once, and nothing sampled again"
    assert history.seen[0] == history.seen[1], "files as they were, to their times, without what the policy did"
    assert metrics["rollout/from_snapshot"] == metrics["rollout/rebuilt"] == 1.0
    assert (metrics["rollout/started_over"], len(finished.broken), finished.rollout.attempt) == (0.0, 1, 1)
    assert sampled(finished) == sampled(plain)


@pytest.mark.full
def test_a_box_that_is_filled_in_open_is_filled_again(bench: Bench) -> None:
    finished, metrics, _ = bench.play(history := History(breaks=lambda number: number == 1), InOpen)
    assert finished is not None and finished.score is not None and history.prepared == 3
    assert "rollout/from_snapshot" not in metrics and metrics["rollout/started_over"] == 1.0


def test_what_breaks_in_a_fork_as_well_is_prepared_anew(bench: Bench) -> None:
    """A fork may break by what it shares with the box that broke: it costs no retry, and there is one at a place."""
    finished, metrics, _ = bench.play(history := History(breaks=lambda number: True), Always, rebuilds=2)
    assert finished is not None and finished.score is None and len(finished.broken) == 3
    assert (history.prepared, history.opened, metrics["rollout/from_snapshot"]) == (3, 4, 1.0)


def test_a_fork_is_no_further_world_in_which_a_call_broke() -> None:
    """Law 6: three rebuilt worlds. What two boxes share may be what breaks in both."""
    place, failure = Place(call=("step", "policy"), number=1), Failure(error="X", where="y", message="z")
    successes = Successes()
    calls, others, verdicts = WorldCalls(successes), WorldCalls(successes), []
    for is_fork in (False, True, False, True, False, False):
        verdicts.append(calls.broke(place, failure, is_fork=is_fork))
        others.succeeded(Place(call=place.call, number=0))
    assert verdicts == [False] * 5 + [True]


def test_a_snapshot_that_is_gone_is_as_none(bench: Bench) -> None:
    async def work() -> None:
        box = await bench.boxes.take(BoxSpec(timeout_s=20.0))
        await box.write("word", b"x")
        kept = await box.snapshot()
        fork = await (whole := Preparation(kept)).take(bench.boxes, box.spec)  # type: ignore[attr-defined]
        assert whole.is_fork and await fork.read("word") == b"x"
        other: Any = object()
        fresh = await (foreign := Preparation(other)).take(bench.boxes, box.spec)  # type: ignore[attr-defined]
        assert not foreign.is_fork and await fresh.entries() == {}
        for layer in kept.layers:  # type: ignore[attr-defined]
            layer.close()
        lost = await Preparation(kept).take(bench.boxes, box.spec)  # type: ignore[attr-defined]
        with pytest.raises(SandboxError, match="the snapshot's pool is closed"):
            await lost.read("word")  # so the attempt breaks, and the next one prepares anew
        for one in (box, fork, fresh, lost):
            await one.close()

    bench.run(work())


class Trying(Env):
    """A world that tries something in a fork while it prepares."""

    async def prepare(self, task: Task, box: Any) -> None:
        await box.write("word", b"early")
        fork = await box.fork(await box.snapshot())
        assert (await fork.exec("cat word")).stdout == "early"
        await fork.close()
        await box.write("word", b"late")


def test_verifiers_are_forks_of_what_a_world_left_though_it_made_snapshots(bench: Bench) -> None:
    async def work() -> list[bytes]:
        box: Any = await bench.boxes.take(BoxSpec(timeout_s=20.0))
        preparation = Preparation()
        await preparation.prepare(Trying(), TASK, box, lambda method, *arguments: method(*arguments))
        await box.exec("echo spoilt > word")
        retry = await Preparation(preparation.snapshot).take(bench.boxes, box.spec)
        boxes = [await box.verifier([]), retry, await retry.verifier([])]
        found = [await one.read("word") for one in boxes]
        for one in (*boxes, box):
            await one.close()
        return found

    assert bench.run(work()) == [b"late"] * 3


@pytest.mark.full
def test_a_rollout_of_a_run_that_was_killed_is_prepared_anew(bench: Bench, tmp_path: Path) -> None:
    """Layers end with the process that holds them. A world whose preparation comes out the same goes on."""
    store = SqliteStore(tmp_path / "store.sqlite")
    whole, _, requests = bench.play(History(), Always)
    stopped, _, asked = bench.play(first := History(stops_at=2), Always, store=store)
    assert (stopped, first.prepared) == (None, 1)
    finished, metrics, after = bench.play(second := History(), Always, store=store)
    assert whole is not None and finished is not None and tokens(finished) == tokens(whole)
    assert (second.prepared, asked + after, metrics["rollout/rebuilt"]) == (1, requests, 1.0)
    assert "rollout/from_snapshot" not in metrics
    store.close()


def test_the_base_class_prepares_nothing(bench: Bench) -> None:
    """A snapshot starts a box, which a world that needs none does not pay for."""

    async def work() -> None:
        box: Any = await bench.boxes.take(BoxSpec(timeout_s=20.0))
        preparation = Preparation()
        await preparation.prepare(Env(), TASK, box, lambda *_: asyncio.sleep(0))
        assert preparation.snapshot is None and box.commands.group is None
        await box.close()

    bench.run(work())
