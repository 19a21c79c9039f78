"""What rollout control costs and saves: waiting for slow tools, the log, resuming, rebuilding, replaying, memory.

    python benchmarks/rollouts.py [--parts lag,log,resume,memory,replay] [--short] [--threads 1]

lag: a real run (the quickstart's model with random weights, native engine, trainer, store) whose tools sleep, in real
time, 20 ms to 4 s with a heavy tail (Pareto, exponent 1.1), at `max_lag` 0, 2 and 8. Bound: the larger of the seconds
that engine and trainer work for a step, of a run whose tools do not sleep. log: that run with its store and without,
in turns: processor seconds that the event loop takes more, as a share of those of the step, and seconds inside the
store. resume: recorded groups are read back and taken again, a half-done rollout is rebuilt, per turn. memory: what
Python holds for a rollout that waits for its step, per token. replay: `sparring replay` of a short quickstart with
`max_lag` 2, beside the steps that it repeats. The last line is one JSON object with `claims`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from common.appending import AppendingRenderer
from common.figures import ROOT, claim, read_options
from rl_step import prepare

from sparring.envs.base import Env
from sparring.envs.splits import Stream
from sparring.envs.threads import THREADS
from sparring.generation import GenerateRequest, Sampling
from sparring.harness.chat import ChatHarness
from sparring.observe.hooks import timed
from sparring.observe.spans import Spans
from sparring.protocols import Scorer
from sparring.record.recorder import Recorder
from sparring.rollout.config import RolloutConfig
from sparring.rollout.group_log import GroupLog
from sparring.rollout.journal import Journals
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.window import Window
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.types import Limits, Message, Observation, Score, Segment, Task, Trajectory

GROUPS, GROUP_SIZE, TURNS, NEW_TOKENS = 8, 8, 3, 48
SHORTEST_S, LONGEST_S, EXPONENT = 0.02, 4.0, 1.1
LIMITS = Limits(max_turns=1000, max_tokens=10**6, max_tool_calls=1000)


class Talk(Env):
    """Conversation of a number of turns; before each answer it sleeps as long as the task's seed and the turn say."""

    def __init__(self, turns: int, sleeps: bool) -> None:
        super().__init__()
        self._turns, self._sleeps, self._turn = turns, sleeps, 0

    async def step(self, reply: Message) -> Observation:
        """Sleep, then say a digit."""
        self._turn += 1
        if self._sleeps:
            drawn = Random(f"{self.task.seed}/{id(self)}/{self._turn}").paretovariate(EXPONENT)
            await asyncio.sleep(min(LONGEST_S, SHORTEST_S * drawn))
        if self._turn == self._turns:
            return Observation(done=True)
        return Observation(messages=(Message(role="user", content=str(self._turn % 10)),))

    async def score(self, trajectory: Trajectory) -> Score:
        """Return a reward that differs within a group."""
        return Score(reward=sum(trajectory.segments[-1].tokens) % 7 / 7)


@dataclass
class TalkFactory:
    """The `EnvFactory` of `Talk`."""

    turns: int
    sleeps: bool = False
    name = "talk"
    scorer: Scorer | None = None

    def make(self) -> Env:
        """Return one conversation."""
        return Talk(self.turns, self.sleeps)

    def tasks(self, split: str, seed: int) -> Stream:
        """Return tasks without end."""
        return Stream(self.task)

    def expert(self, task: Task) -> None:
        """Return no expert."""

    async def prove(self, boxes: Any) -> tuple[int, int]:
        """Prove nothing."""
        return 0, 0

    def task(self, index: int) -> Task:
        """Return a task that opens with a number."""
        message = Message(role="user", content=str(100 + index % 900))
        return Task(id=f"talk/{index}", env=self.name, messages=(message,), seed=index, limits=LIMITS)


class Clocked:
    """Store under a stopwatch: `seconds` inside its methods."""

    def __init__(self, store: SqliteStore) -> None:
        self._store, self.seconds = store, 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not callable(value):
            return value

        def clocked(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return value(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return clocked


def scheduler_of(
    engine: Any, renderer: Any, factory: TalkFactory, store: Any, window: Window, sampling: Sampling
) -> Scheduler:
    """Return a scheduler as `stages/runtime/online.py` makes it."""
    config = RolloutConfig(group_size=GROUP_SIZE, max_concurrent_rollouts=1024)
    recorder = Recorder(engine, renderer, store, sampling=sampling, max_context=100_000 if sampling.seed else 512)
    log = Journals(store, begins=True)
    no_boxes: Any = None
    runner = RolloutRunner(factory, no_boxes, recorder, ChatHarness(), config, executors=THREADS.executor, log=log)
    tasks = factory.tasks("train", 0)
    groups = GroupLog(store, "rl")
    return Scheduler(runner, tasks, window, run_seed=0, engine_version=lambda: engine.version, log=groups)


# Runs that wait for tools, and the log.


class Run:
    """Trainer and engine of one model, which do as many runs as are asked for."""

    def __init__(self, folder: str, threads: int) -> None:
        from sparring.algo.config import AlgoConfig
        from sparring.algo.loss.policy import PolicyLoss
        from sparring.cluster.inline import InlineCluster
        from sparring.engine.config import EngineConfig
        from sparring.model.config import ModelConfig
        from sparring.protocols import TrainPlan
        from sparring.render.load import load_renderer
        from sparring.stages.runtime.timing import TRAINER_SPANS
        from sparring.train.config import TrainConfig

        spec = prepare("quickstart", {"folder": folder, "groups_per_step": GROUPS, "warmup": 0, "steps": 1})
        self._algo, self._folder, self._count = AlgoConfig(zero_variance_filter=False), folder, 0
        self.cluster = InlineCluster(
            models={"policy": ModelConfig(path=spec["model"])},
            train=TrainConfig(learning_rate=1e-5, save_every=0),
            engine=EngineConfig(),
            device="cpu",
            threads=threads,
        )
        self._engine = self.cluster.engine("policy", path=spec["model"])
        plan = TrainPlan(losses=[PolicyLoss(self._algo)], total_steps=10_000, overrides={})
        self._spans = Spans()
        self._trainer = timed(self.cluster.trainer("policy", path=spec["model"], plan=plan), self._spans, TRAINER_SPANS)
        self._renderer = load_renderer(spec["model"])
        self._version = 0

    async def steps(
        self, count: int, *, max_lag: int = 0, sleeps: bool = False, log: bool = True
    ) -> list[dict[str, float]]:
        """Return the seconds of each step: wall clock, processor, engine, trainer, store."""
        from functools import partial

        from sparring.algo.pipeline import load_credit
        from sparring.batch.batches import batches
        from sparring.loop import run_loop
        from sparring.stages.runtime.garbage import fewer_collections

        self._count += 1
        store = Clocked(SqliteStore(f"{self._folder}/{self._count}.sqlite")) if log else None
        window = Window(GROUPS, max_lag, count)
        sampling = Sampling(max_tokens=NEW_TOKENS, stop=(-1,))
        scheduler = scheduler_of(
            Since(self._engine, self._version), self._renderer, TalkFactory(TURNS, sleeps), store, window, sampling
        )
        rows: list[dict[str, float]] = []

        def marks() -> dict[str, float]:
            now = {"wall_s": time.perf_counter(), "cpu_s": time.process_time()}
            return {
                **now,
                "loop_s": time.thread_time(),
                "engine_s": self._engine.metrics.get("busy_s", 0.0),
                "store_s": store.seconds if store else 0,
            }

        before = marks()

        async def after_step(step: Any, batch: Any, metrics: Mapping[str, float]) -> None:
            nonlocal before
            self._version = step.version
            if store is not None:
                store.metric("rl", step.version, {**metrics, **scheduler.metrics()})
            now = marks()
            row = {name: now[name] - before[name] for name in now}
            rows.append({**row, "trainer_s": metrics["forward_backward_s"] + metrics["step_s"]})
            before = now

        made = partial(
            batches,
            steps=range(1, count + 1),
            groups_per_step=GROUPS,
            credit=load_credit(self._algo, seed=0),
            model="policy",
        )
        trainers, engines = {"policy": self._trainer}, {"policy": self._engine}
        with fewer_collections():
            await run_loop(scheduler.groups(), made, trainers, engines, window, after_step)
        if store is not None:
            store.close()
        return rows


class Since:
    """Engine whose versions count from the beginning of one run. Its replies, all as long as they may be, end as if they
    had ended by themselves: weights that learned nothing never end one."""

    def __init__(self, engine: Any, version: int) -> None:
        self._engine, self._first = engine, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Any:
        """Sample a reply."""
        return replace(await self._engine.generate(request), finish_reason="stop")

    @property
    def version(self) -> int:
        """Versions since then."""
        return int(self._engine.version) - self._first


def median(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the median over steps."""
    return statistics.median(row[name] for row in rows)


async def lag(run: Run, short: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure runs with sleeping tools against the bound."""
    count = 3 if short else 24
    alone = (await run.steps(count))[2:]
    work = {name: median(alone, name) for name in ("engine_s", "trainer_s", "wall_s", "cpu_s")}
    bound = max(work["engine_s"], work["trainer_s"])
    figures: dict[str, Any] = {"bound_s": bound, "without_sleep": work}
    print(
        f"\na step: engine {work['engine_s']:.3f} s, trainer {work['trainer_s']:.3f} s, without sleep {work['wall_s']:.3f} s\n"
    )
    print("| `max_lag` | a step, s | processor s | over the bound | over a step without sleep |")
    print("| --- | --- | --- | --- | --- |")
    for max_lag in (0, 2, 8):
        rows = (await run.steps(count + 2 * max_lag, max_lag=max_lag, sleeps=True))[max_lag + 2 : -max_lag or None]
        step_s = sum(row["wall_s"] for row in rows) / len(rows)
        figures[f"lag_{max_lag}_s"] = step_s
        cpu_s = median(rows, "cpu_s")
        print(
            f"| {max_lag} | {step_s:.3f} | {cpu_s:.3f} | {step_s / bound:.2f} | {step_s / work['wall_s']:.2f} |",
            flush=True,
        )
    eight = figures["lag_8_s"]
    return figures, [
        claim("a step at max_lag 8, tools asleep, over one whose tools do not sleep", eight / work["wall_s"], "", 1.1),
        claim("a step at max_lag 8 over the bound", eight / bound, "", 1.5),
    ]


async def log_cost(run: Run, short: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure the same run with its log and without."""
    with_log, without = [], []
    await run.steps(2)
    for _ in range(1 if short else 8):
        with_log.append((await run.steps(6))[1:])
        without.append((await run.steps(6, log=False))[1:])
    ratios = [
        (median(a, "loop_s") - median(b, "loop_s")) / median(a, "cpu_s") for a, b in zip(with_log, without, strict=True)
    ]
    rows = [row for part in with_log for row in part]
    inside = sum(row["store_s"] for row in rows) / sum(row["wall_s"] for row in rows)
    cost = statistics.median(ratios)
    print(f"\nlog: {cost:.1%} of a step's processor seconds (turns: {', '.join(f'{r:.1%}' for r in sorted(ratios))}),")
    print(f"     {inside:.1%} of its time inside the store", flush=True)
    figures = {"share_of_cpu": cost, "by_turn": ratios, "inside_store": inside, "step_cpu_s": median(rows, "cpu_s")}
    return figures, [claim("the log, share of a step", max(cost, inside), "", 0.02)]


# Resuming and rebuilding.


def ids(count: int) -> Callable[[GenerateRequest], tuple[int, ...]]:
    """Return a script that says `count` ids, which hang on the seed, and the end."""
    return lambda request: (*(300 + (request.sampling.seed + at) % 1000 for at in range(count - 1)), 0)


class Stops:
    """Engine that answers `turns` turns of a conversation and then never again. `asked` is set when it is asked
    more."""

    def __init__(self, turns: int, tokens: int) -> None:
        self._engine, self._turns = ScriptedEngine(ids(tokens)), turns
        self.asked = asyncio.Event()
        self.answered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Any:
        """Answer, or wait for ever."""
        if self.answered == self._turns:
            self.asked.set()
            await asyncio.Event().wait()
        self.answered += 1
        return await self._engine.generate(request)


async def rebuilt(turns: int, tokens: int, folder: str) -> tuple[float, float]:
    """Return microseconds a turn of a rollout that is sampled, by an engine that takes no time, and of one that is
    rebuilt in another process."""
    path, times = f"{folder}/rebuild.sqlite", []
    for expected in (turns, 0):
        store, engine = SqliteStore(path), Stops(expected, tokens)
        recorder = Recorder(engine, AppendingRenderer(), store, sampling=Sampling(max_tokens=tokens), max_context=10**6)
        factory = TalkFactory(turns + 8)
        no_boxes: Any = None
        runner = RolloutRunner(
            factory, no_boxes, recorder, ChatHarness(), RolloutConfig(), executors=THREADS.executor, log=Journals(store)
        )
        began = time.perf_counter()
        task = asyncio.create_task(runner.run(factory.task(0), rollout_id="rl/0/0", index=0, seed=1))
        await engine.asked.wait()
        times.append((time.perf_counter() - began) / turns * 1e6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        store.close()
    return times[0], times[1]


async def reread(groups: int, folder: str) -> float:
    """Return milliseconds that a resume takes for each recorded group of a step that it trains again."""
    path, sampling = f"{folder}/resume.sqlite", Sampling(max_tokens=50, seed=1)
    steps = groups // GROUPS
    for again in (False, True):
        store, window, engine = SqliteStore(path), Window(GROUPS, 0, steps + 1), ScriptedEngine(ids(50))
        versions = Released(engine, window)
        scheduler = scheduler_of(versions, AppendingRenderer(), TalkFactory(10), store, window, sampling)
        scheduler.resume(steps if again else 0)
        began, count = time.perf_counter(), 0
        async for _ in scheduler.groups():
            count += 1
            if count == groups:
                break
            if count % GROUPS == 0:
                window.release(count // GROUPS)
        elapsed = time.perf_counter() - began
        await scheduler.close()
        store.close()
    return elapsed / groups * 1e3


class Released:
    """Engine that serves what was released."""

    def __init__(self, engine: ScriptedEngine, window: Window) -> None:
        self._engine, self._window = engine, window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def version(self) -> int:
        """The last released step."""
        return self._window.released_steps


async def resume(short: bool, folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure what comes back from the store."""
    sampled_us, rebuilt_us = await rebuilt(16 if short else 256, 64, folder)
    group_ms = await reread(GROUPS * (1 if short else 8), folder)
    print(
        f"\nrebuilding: {rebuilt_us:.0f} us a turn of 64 tokens; sampling it with an engine that takes no time: {sampled_us:.0f} us"
    )
    print(f"resume: {group_ms:.2f} ms for a recorded group of {GROUP_SIZE} rollouts of 500 tokens", flush=True)
    return {"rebuilt_us": rebuilt_us, "sampled_us": sampled_us, "group_ms": group_ms}, []


# Memory.


async def held(turns: int, tokens: int) -> float:
    """Return the bytes a sampled token of finished rollouts that wait for their step."""
    groups, engine = 4, ScriptedEngine(ids(tokens))
    window = Window(groups, 0, 1)
    sampling = Sampling(max_tokens=tokens, seed=1)
    scheduler = scheduler_of(engine, AppendingRenderer(), TalkFactory(turns), None, window, sampling)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    taken = [group async for group in scheduler.groups()]
    await scheduler.close()
    engine.requests.clear()
    engine.held.clear()
    await asyncio.sleep(0.05)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / sum(len(segment.tokens) for segment in sampled(taken))


def sampled(groups: Sequence[Any]) -> list[Segment]:
    """Return the sampled segments."""
    trajectories = [t for group in groups for rollout in group.rollouts for t in rollout.trajectories]
    return [segment for trajectory in trajectories for segment in trajectory.segments if segment.model is not None]


async def memory(short: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure long rollouts and short ones; the least of four, because threads of environments are made now and then."""
    await held(2, 20)  # what is made once
    figures = {
        f"{turns} turns of {tokens}": min([await held(turns, tokens) for _ in range(1 if short else 4)])
        for turns, tokens in ((1, 500), (5, 100), (2, 32))
    }
    print("\n| rollouts of | bytes a sampled token |\n| --- | --- |")
    for name, value in figures.items():
        print(f"| {name} tokens | {value:.1f} |")
    return figures, [claim("bytes a buffered token, rollouts of 500", figures["1 turns of 500"], "B", 32)]


# Replay.


def replayed(short: bool, folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure `sparring replay` of a run of two stages."""
    steps, sft, groups = (1, 1, 2) if short else (8, 200, 16)
    settings = {
        "run.directory": folder,
        "run.stages": '["init", "sft", "rl"]',
        "sft.steps": sft,
        "rl.steps": steps,
        "rl.groups_per_step": groups,
        "rollout.max_lag": 2,
        "eval.tasks": 60,
    }
    program = [sys.executable, "-m", "sparring.cli.main"]
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    _seconds([*program, "run", str(ROOT / "recipes" / "quickstart.toml"), "--name", "run", *changes])
    store = SqliteStore(f"{folder}/run/store.sqlite", read_only=True)
    live_s = sum(values["time/step_s"] for _, values in store.metrics("rl"))
    store.close()
    imports_s = _seconds([*program, "replay", f"{folder}/run", "--steps", "1:1", "--no-sampling"])
    figures = {"steps": steps, "live_s": live_s, "shortest_s": imports_s}
    print(
        f"\nreplay of {steps} steps, which took {live_s:.1f} s; one step without sampling and the start {imports_s:.1f} s"
    )
    print("| | s |\n| --- | --- |")
    for name, flags in (("sampled and trained", ()), ("trained alone", ("--no-sampling",))):
        figures[name] = _seconds([*program, "replay", f"{folder}/run", *flags])
        print(f"| {name} | {figures[name]:.1f} |", flush=True)
    return figures, []


def _seconds(command: Sequence[str]) -> float:
    """Return the seconds that a command took."""
    began = time.perf_counter()
    done = subprocess.run(command, check=False, env=os.environ, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


async def measure(parts: Sequence[str], short: bool, threads: int, folder: str) -> dict[str, Any]:
    """Measure the parts in one event loop; return figures and claims by part."""
    results: dict[str, Any] = {}
    if "lag" in parts or "log" in parts:
        run = Run(folder, threads)
        if "lag" in parts:
            results["lag"] = await lag(run, short)
        if "log" in parts:
            results["log"] = await log_cost(run, short)
        await run.cluster.close()
    if "resume" in parts:
        results["resume"] = await resume(short, folder)
    if "memory" in parts:
        results["memory"] = await memory(short)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="lag,log,resume,memory,replay")
    parser.add_argument("--threads", type=int, default=1, help="of trainer and engine, each")
    arguments = read_options(parser)
    parts = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(parts, arguments.short, arguments.threads, folder))
        if "replay" in parts:
            results["replay"] = replayed(arguments.short, folder)
    claims = [each for _, made in results.values() for each in made]
    figures = {name: figures for name, (figures, _) in results.items()}
    print(json.dumps({"benchmark": "rollouts", "threads": arguments.threads, **figures, "claims": claims}))


if __name__ == "__main__":
    main()
