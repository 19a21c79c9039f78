"""One RL step of the real path against TRL's `GRPOTrainer` and against arithmetic.

    python benchmarks/rl_step.py --setup                      # once: TRL into its own virtual environment, .venv-trl
    python benchmarks/rl_step.py [--sizes A,quickstart,S] [--steps 9] [--warmup 2] [--threads 2]
                                 [--peer defaults | --without-trl]

A step: 8 prompts x 8 completions (of size S, the shape of SmolLM2-135M, 4 x 4: beyond, TRL does not fit into 24 GiB), 32
prompt tokens, exactly 64 new tokens, float32, temperature 1, one optimiser step, the weights given back to the engine. Ours is what a run does: scheduler, recorded sessions, native engine, store,
batches, GRPO, trainer, verified weight update. Both sides get the same model files, the same prompts to the token, the
same reward, learning rate, clipping and optimiser, and two threads that sleep while they wait. Each side is a process
of its own, and they take turns step by step: one waits for its turn while the other computes, so that a change of the
machine meets both. TRL is given what makes it fastest here: no gradient checkpointing, a static cache, sleeping
threads. `--peer defaults` leaves all three as whoever installs it gets them.

The floor is (6 x parameters x trained tokens + 2 x parameters x generated tokens) / peak, where peak is the best rate
of matrix products [2048, 1024] x [1024, 2048] in the very process that is measured, right before and right after each
of its steps. The last line is one JSON object with `claims`: medians over the steps, of floors and of (TRL's step / our
step before it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from common.figures import ROOT, claim, read_options
from memory import SMOLLM2_135M, make
from peers.sides import Side, environment, install

PEERS, PEER_VENV = ROOT / "benchmarks" / "peers", ROOT / ".venv-trl"

PROMPT_TOKENS, NEW_TOKENS, LEARNING_RATE = 32, 64, 1e-5
GROUPS = {"A": (8, 8), "quickstart": (8, 8), "S": (4, 4)}
"""Prompts of a step, and completions of each, by size."""
MODEL_A: dict[str, Any] = {
    "hidden_size": 256,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "max_positions": 512,
    "tie_embeddings": False,
    "vocab_size": 4096,
}
FLOORS = {"A": 2.2, "S": 1.85}
FASTER = {"A": 1.5, "quickstart": 5.0, "S": 2.6}
UPDATING_S = {"S": 0.8}


# What both sides are given.


def prepare(size: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Write model and tokenizer into spec["folder"] and fill in `model`, `parameters` and `prompts`."""
    from sparring.model.config import InitConfig
    from sparring.model.create import create
    from sparring.model.load import load
    from sparring.recipe.load import load as load_recipe
    from sparring.render.load import load_renderer
    from sparring.render.train_tokenizer import train_tokenizer
    from sparring.types import Message

    model = f"{spec['folder']}/model"
    if size == "S":
        make(Path(model), *SMOLLM2_135M, "float32")
        renderer = load_renderer(model)
    else:
        init = load_recipe(ROOT / "recipes" / "quickstart.toml").models["policy"].init if size == "quickstart" else None
        init = init or InitConfig(**MODEL_A)
        train_tokenizer(["user assistant system"], init.vocab_size, model)
        renderer = load_renderer(model)
        end, pad = renderer.stop_ids[0], renderer.stop_ids[-1]
        create(init, init.vocab_size, model, 0, eos_token_id=end, pad_token_id=pad)
    frame = len(renderer.render([Message(role="user", content="")], ()).tokens)
    random = Random(0)
    prompts = []
    for _ in range(spec["groups_per_step"] * (spec["warmup"] + spec["steps"])):
        content = "".join(random.choice("0123456789") for _ in range(PROMPT_TOKENS - frame))
        tokens = renderer.render([Message(role="user", content=content)], ()).tokens
        assert len(tokens) == PROMPT_TOKENS, len(tokens)
        prompts.append({"content": content, "text": renderer.decode(tokens), "tokens": tokens})
    parameters = sum(tensor.numel() for tensor in load(model).state().values())
    return {**spec, "model": model, "parameters": parameters, "prompts": prompts}


# Our side.


def peak_flops(seconds: float = 0.15) -> float:
    """Floating-point operations per second of float32 matrix products: the best of all that fit into `seconds`."""
    import torch

    a, b, out = torch.randn(2048, 1024), torch.randn(1024, 2048), torch.empty(2048, 2048)
    best, until = 0.0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        torch.mm(a, b, out=out)
        best = max(best, 2 * 2048 * 1024 * 2048 / (time.perf_counter() - start))
    return best


def world(prompts: list[dict[str, Any]]) -> Any:
    """An `EnvFactory` of single questions. Its reward is arbitrary, but a function of the sampled ids."""
    from sparring.envs.base import Env
    from sparring.envs.splits import Stream
    from sparring.types import Message, Score, Task, Trajectory

    class Digits(Env):
        """Any answer is worth something between 0 and 1."""

        async def score(self, trajectory: Trajectory) -> Score:
            tokens = trajectory.segments[-1].tokens
            assert len(tokens) == NEW_TOKENS, len(tokens)
            return Score(reward=zlib.crc32(array("q", tokens).tobytes()) / 2**32)

    class Factory:
        """Each prompt once, in order."""

        name = "digits"
        scorer = None

        def make(self) -> Env:
            return Digits()

        def tasks(self, split: str, seed: int) -> Stream:
            return Stream(lambda index: self._task(index) if index < len(prompts) else None)

        def expert(self, task: Task) -> None:
            return None

        def _task(self, index: int) -> Task:
            message = Message(role="user", content=prompts[index]["content"])
            return Task(id=f"digits/{index}", env=self.name, messages=(message,), seed=index)

    return Factory()


class Steps:
    """Takes the time of every step and where it went, in seconds, and lets the next one begin when it is its turn."""

    def __init__(self, engine_metrics: Callable[[], Mapping[str, float]], clock: Any) -> None:
        self._engine_metrics = engine_metrics
        self._clock = clock
        self._peak = 0.0
        self._begin()

    def add(self, metrics: Mapping[str, float], sampled: int) -> None:
        """At the end of a step; `metrics` are the trainer's."""
        cpu_s = time.process_time() - self._cpu_before
        lap, engine = self._clock.lap(sampled), dict(self._engine_metrics())
        total = lap["time/step_s"]
        spent = {name: total * lap.get(f"time/{name}", 0.0) for name in ("generating", "updating")}
        busy = {
            name: engine[name] - self._engine_before.get(name, 0.0) for name in ("busy_s", "steps", "prefill_tokens")
        }
        trained = metrics["forward_backward_s"] + metrics["step_s"]
        peak, self._peak = self._peak, peak_flops()
        row = {
            "step_s": total,
            "cpu_s": cpu_s,
            "peak_flops": max(peak, self._peak),
            "generating_s": spent["generating"],
            "engine_busy_s": busy["busy_s"],
            "engine_steps": busy["steps"],
            "prefill_tokens": busy["prefill_tokens"],
            "forward_backward_s": metrics["forward_backward_s"],
            "tokens_forward": metrics["tokens_forward"],
            "optimiser_s": metrics["step_s"],
            "updating_s": spent["updating"],
            "rest_s": total - spent["generating"] - spent["updating"] - trained,
            "logprob_max_abs_diff": metrics["logprob_max_abs_diff"],
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        print(json.dumps(row), flush=True)
        self._begin()

    def _begin(self) -> None:
        """Wait for our turn; nothing of the next step has begun, because the event loop waits with us."""
        sys.stdin.readline()
        self._peak = peak_flops()
        self._clock.lap(0)
        self._engine_before, self._cpu_before = dict(self._engine_metrics()), time.process_time()


def scheduler_of(spec: Mapping[str, Any], engine: Any, store: Any, boxes: Any) -> tuple[Any, Any]:
    """The scheduler of single-turn rollouts that never stop early, and its window."""
    from sparring.harness.chat import ChatHarness
    from sparring.record.recorder import Recorder
    from sparring.render.load import load_renderer
    from sparring.rollout.config import RolloutConfig, SamplingConfig
    from sparring.rollout.group_log import GroupLog
    from sparring.rollout.runner import RolloutRunner
    from sparring.rollout.scheduler import Scheduler
    from sparring.rollout.window import Window

    config = RolloutConfig(group_size=spec["group_size"], sampling=SamplingConfig(max_turn_tokens=NEW_TOKENS))
    # an id that no model samples, so that nothing stops early
    sampling, room = config.sampling.build(stop=(-1,)), PROMPT_TOKENS + NEW_TOKENS
    recorder = Recorder(engine, load_renderer(spec["model"]), store, sampling=sampling, max_context=room)
    factory, window = world(spec["prompts"]), Window(spec["groups_per_step"], 0, spec["warmup"] + spec["steps"])
    runner = RolloutRunner(factory, boxes, recorder, ChatHarness(), config)
    tasks, log = factory.tasks("train", 0), GroupLog(store, "rl")
    return Scheduler(runner, tasks, window, run_seed=0, engine_version=lambda: engine.version, log=log), window


async def train(spec: Mapping[str, Any]) -> None:
    """Train as `stages/runtime/online.py` does, and print what every step took."""
    from sparring.algo.config import AlgoConfig
    from sparring.algo.loss.policy import PolicyLoss
    from sparring.algo.pipeline import load_credit
    from sparring.batch.batches import batches
    from sparring.cluster.inline import InlineCluster
    from sparring.engine.config import EngineConfig
    from sparring.loop import run_loop
    from sparring.model.config import ModelConfig
    from sparring.observe.hooks import timed
    from sparring.observe.spans import Spans
    from sparring.protocols import TrainPlan
    from sparring.sandbox.bubblewrap import BubblewrapBoxes
    from sparring.sandbox.config import SandboxConfig
    from sparring.stages.runtime.timing import ENGINE_SPANS, TRAINER_SPANS, StepClock
    from sparring.store.sqlite import SqliteStore
    from sparring.train.config import TrainConfig

    steps, path, algo = spec["warmup"] + spec["steps"], spec["model"], AlgoConfig(zero_variance_filter=False)
    cluster = InlineCluster(
        models={"policy": ModelConfig(path=path)},
        train=TrainConfig(learning_rate=LEARNING_RATE, save_every=0),
        engine=EngineConfig(),
        device="cpu",
        threads=spec["threads"],
    )
    spans, native = Spans(), cluster.engine("policy", path=path)
    engine = timed(native, spans, ENGINE_SPANS)
    plan = TrainPlan(losses=[PolicyLoss(algo)], total_steps=steps, overrides={})
    trainer = timed(cluster.trainer("policy", path=path, plan=plan), spans, TRAINER_SPANS)
    store, boxes = SqliteStore(f"{spec['folder']}/store.sqlite"), BubblewrapBoxes(SandboxConfig())
    scheduler, window = scheduler_of(spec, engine, store, boxes)
    taken = Steps(lambda: native.metrics, StepClock(spans))

    async def after_step(step: Any, batch: Any, metrics: Mapping[str, float]) -> None:
        assert batch.account.trained == batch.account.sampled == new_tokens(spec), batch.account
        store.metric("rl", step.version, {**metrics, **scheduler.metrics()})
        taken.add(metrics, batch.account.sampled)

    credit, numbers = load_credit(algo, seed=0), range(1, steps + 1)
    fixed = {"steps": numbers, "groups_per_step": spec["groups_per_step"], "credit": credit, "model": "policy"}
    made = partial(batches, **fixed)
    await run_loop(scheduler.groups(), made, {"policy": trainer}, {"policy": engine}, window, after_step)
    store.close()
    await boxes.close()
    await cluster.close()


# In turns.


def floor_s(spec: Mapping[str, Any], peak: float) -> float:
    """Seconds that the step's matrix products alone would take."""
    seconds: float = (6 + 2) * spec["parameters"] * new_tokens(spec) / peak
    return seconds


def new_tokens(spec: Mapping[str, Any]) -> int:
    """Tokens that a step samples and trains."""
    sampled: int = spec["groups_per_step"] * spec["group_size"] * NEW_TOKENS
    return sampled


def measure(size: str, spec: dict[str, Any], with_trl: bool) -> dict[str, Any]:
    """Alternate the two sides step by step."""
    path = Path(spec["folder"]) / "spec.json"
    path.write_text(json.dumps(spec))
    me = [sys.executable, __file__, "--sizes", size, "--spec", path, "--role"]
    subprocess.run([*map(str, me), "prepare"], env=environment(spec["threads"]), check=True)
    spec = json.loads(path.read_text())
    sides = [Side([*me, "ours", "--threads", spec["threads"]], environment(spec["threads"]))]
    if with_trl:
        variables = environment(spec["threads"], sleeping=spec["peer"] == "fastest")
        sides.append(Side([PEER_VENV / "bin" / "python", PEERS / "trl_step.py", path], variables))
    turns = [[side.turn() for side in sides] for _ in range(spec["warmup"] + spec["steps"])][spec["warmup"] :]
    for side in sides:
        side.close()
    rows = [ours for ours, *_ in turns]
    for row in rows:
        row["floors"] = row["step_s"] / floor_s(spec, row["peak_flops"])
    figures = {
        "parameters": spec["parameters"],
        "ours": {name: statistics.median(r[name] for r in rows) for name in rows[0]},
    }
    figures["floors_by_step"] = [round(row["floors"], 3) for row in rows]
    if with_trl:
        theirs = [row for _, row in turns]
        figures["trl"] = {name: statistics.median(row[name] for row in theirs) for name in theirs[0]}
        for name in ("step_s", "cpu_s"):
            ratios = [b[name] / a[name] for a, b in turns]
            figures[f"trl_over_ours_{name}"] = statistics.median(ratios)
            figures[f"trl_over_ours_{name}_by_step"] = [round(ratio, 3) for ratio in ratios]
    return figures


def report(size: str, figures: Mapping[str, Any]) -> None:
    """The same for people."""
    print(f"{size}: {figures['parameters']} parameters")
    for side in ("ours", "trl"):
        for name, value in figures.get(side, {}).items():
            print(f"    {side:4} {name:22} {value:16.4f}")
    for name in (name for name in figures if name.endswith("_by_step")):
        print(f"    {name}: {figures[name]}", flush=True)


def claims(size: str, figures: Mapping[str, Any]) -> list[dict[str, object]]:
    """The medians over the steps, against their targets."""
    found = []
    if size in FLOORS:
        found.append((f"RL step in arithmetic floors, {size}", figures["ours"]["floors"], "floors", FLOORS[size], "<="))
    if size in UPDATING_S:
        found.append((f"update of weights, {size}", figures["ours"]["updating_s"], "s", UPDATING_S[size], "<="))
    if "trl" in figures:
        found.append((f"RL step of TRL over ours, {size}", figures["trl_over_ours_step_s"], "x", FASTER[size], ">="))
    return [claim(*of) for of in found]


def main() -> None:
    """Measure in turns and print; or do what one `--role` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install the peer and stop")
    parser.add_argument("--sizes", default="A,quickstart")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", choices=("fastest", "defaults"), default="fastest", help="TRL's settings")
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--role", choices=("prepare", "ours"), help="one process of the measurement")
    parser.add_argument("--spec", type=Path, help="with --role")
    arguments = read_options(parser, sizes="quickstart", steps=1, warmup=0, without_trl=True)
    if arguments.role == "prepare":
        spec = json.loads(arguments.spec.read_text())
        arguments.spec.write_text(json.dumps(prepare(arguments.sizes, spec)))
        return
    if arguments.role == "ours":
        from sparring.allocator import share_freed_memory

        share_freed_memory()  # as `sparring run` does
        import torch

        torch.set_num_threads(arguments.threads)
        asyncio.run(train(json.loads(arguments.spec.read_text())))
        return
    if arguments.setup or not arguments.without_trl:
        install(PEER_VENV, PEERS / "trl.txt")
    if arguments.setup:
        return
    load_before, figures, made = os.getloadavg()[0], {}, []
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            spec = {
                "folder": folder,
                "warmup": arguments.warmup,
                "steps": arguments.steps,
                "threads": arguments.threads,
            }
            spec |= dict(zip(("groups_per_step", "group_size"), GROUPS[size], strict=True)) | {"new_tokens": NEW_TOKENS}
            spec |= {"learning_rate": LEARNING_RATE, "peer": arguments.peer}
            figures[size] = measure(size, spec, not arguments.without_trl)
            report(size, figures[size])
        made += claims(size, figures[size])
    about = {"benchmark": "rl_step", "threads": arguments.threads, "peer": arguments.peer, "load_before": load_before}
    print(json.dumps({**about, "sizes": figures, "claims": made}))


if __name__ == "__main__":
    main()
