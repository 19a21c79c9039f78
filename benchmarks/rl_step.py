"""One RL step of the real path against TRL's `GRPOTrainer` and against arithmetic.

    python benchmarks/rl_step.py --setup                      # once: TRL into its own virtual environment, .venv-trl
    python benchmarks/rl_step.py [--sizes A,quickstart] [--pairs 3] [--steps 5] [--warmup 2] [--threads 2] [--without-trl]

A step: 8 prompts x 8 completions, 32 prompt tokens, exactly 64 new tokens, float32, temperature 1, one optimiser step, the
weights given back to the engine. Ours is what a run does: scheduler, recorded sessions, native engine, store, batches, GRPO,
trainer, verified weight update. Both sides get the same model files, the same prompts to the token, the same reward, learning rate,
clipping and optimiser, and two threads. They run in turns, each in a process of its own: ours, theirs, ours, theirs.

The floor is (6 x parameters x trained tokens + 2 x parameters x generated tokens) / peak, where peak is the best rate of
matrix products [2048, 1024] x [1024, 2048] in the very process that is measured, before and after its steps.
The last line is one JSON object with `claims`.
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
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "benchmarks" / "trl_peer"
PEER_VENV = ROOT / ".venv-trl"
TORCH = "torch==2.13.0"

GROUPS, GROUP_SIZE, PROMPT_TOKENS, NEW_TOKENS, LEARNING_RATE = 8, 8, 32, 64, 1e-5
MODEL_A = {
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
FLOORS = {"A": 2.2}
FASTER = {"A": 1.5, "quickstart": 5.0}


def setup() -> None:
    """The peer's virtual environment, unless it is there already with these requirements. torch comes first: a CPU build then."""
    wanted = f"{TORCH}\n{(PEER / 'requirements.txt').read_text()}"
    stamp = PEER_VENV / ".stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing TRL into {PEER_VENV.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", PEER_VENV], check=True)
    pip = [PEER_VENV / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "-r", PEER / "requirements.txt"], check=True)
    stamp.write_text(wanted)


# What both sides are given.


def prepare(size: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Write model and tokenizer into spec["folder"] and fill in `model`, `parameters` and `prompts`."""
    from sparring.config import load as load_recipe
    from sparring.model.config import InitConfig
    from sparring.model.create import create
    from sparring.model.load import load
    from sparring.render.load import load_renderer
    from sparring.render.train_tokenizer import train_tokenizer
    from sparring.types import Message

    init = load_recipe(ROOT / "recipes" / "quickstart.toml").models["policy"].init if size == "quickstart" else None
    init = init or InitConfig(**MODEL_A)
    model = f"{spec['folder']}/model"
    train_tokenizer(["user assistant system"], init.vocab_size, model)
    renderer = load_renderer(model)
    end, pad = renderer.stop_ids[0], renderer.stop_ids[-1]
    create(init, init.vocab_size, model, 0, eos_token_id=end, pad_token_id=pad)
    frame = len(renderer.render([Message(role="user", content="")], ()).tokens)
    random = Random(0)
    prompts = []
    for _ in range(GROUPS * (spec["warmup"] + spec["steps"])):
        content = "".join(random.choice("0123456789") for _ in range(PROMPT_TOKENS - frame))
        tokens = renderer.render([Message(role="user", content=content)], ()).tokens
        assert len(tokens) == PROMPT_TOKENS, len(tokens)
        prompts.append({"content": content, "text": renderer.decode(tokens), "tokens": tokens})
    parameters = sum(tensor.numel() for tensor in load(model).state().values())
    return {**spec, "model": model, "parameters": parameters, "prompts": prompts}


# Our side.


def peak_flops(seconds: float = 1.0) -> float:
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
    """Takes the time of every step and where it went, in seconds."""

    def __init__(self, engine_metrics: Callable[[], Mapping[str, float]], clock: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self._engine_metrics = engine_metrics
        self._clock = clock
        self._engine_before = dict(engine_metrics())
        self._cpu_before = time.process_time()

    def add(self, metrics: Mapping[str, float], sampled: int) -> None:
        """At the end of a step; `metrics` are the trainer's."""
        lap, engine = self._clock.lap(sampled), dict(self._engine_metrics())
        total = lap["time/step_s"]
        spent = {name: total * lap.get(f"time/{name}", 0.0) for name in ("generating", "training", "updating", "waiting")}
        busy = {name: engine[name] - self._engine_before.get(name, 0.0) for name in ("busy_s", "steps", "prefill_tokens")}
        cpu_s, self._cpu_before = time.process_time() - self._cpu_before, time.process_time()
        self._engine_before = engine
        self.rows.append(
            {
                "step_s": total,
                "cpu_s": cpu_s,
                "generating_s": spent["generating"],
                "engine_busy_s": busy["busy_s"],
                "engine_steps": busy["steps"],
                "prefill_tokens": busy["prefill_tokens"],
                "forward_backward_s": metrics["forward_backward_s"],
                "optimiser_s": metrics["step_s"],
                "updating_s": spent["updating"],
                "rest_s": total - spent["generating"] - spent["updating"] - metrics["forward_backward_s"] - metrics["step_s"],
                "logprob_max_abs_diff": metrics["logprob_max_abs_diff"],
                "tokens_trained": metrics["tokens_trained"],
            }
        )


async def train(spec: Mapping[str, Any]) -> list[dict[str, float]]:
    """Train as `stages/rl.py` does, and return what every step took."""
    from sparring.algo.config import GrpoConfig
    from sparring.algo.credit.load import load_credit
    from sparring.algo.loss.policy import PolicyLoss
    from sparring.batch.batches import batches
    from sparring.cluster.inline import InlineCluster
    from sparring.engine.config import EngineConfig
    from sparring.harness.chat import ChatHarness
    from sparring.loop import run_loop
    from sparring.model.config import ModelConfig
    from sparring.observe.spans import Spans
    from sparring.protocols import TrainPlan
    from sparring.record.recorder import Recorder
    from sparring.render.load import load_renderer
    from sparring.rollout.config import RolloutConfig
    from sparring.rollout.runner import RolloutRunner
    from sparring.rollout.scheduler import Scheduler
    from sparring.rollout.window import Window
    from sparring.sandbox.bubblewrap import BubblewrapBoxes
    from sparring.sandbox.config import SandboxConfig
    from sparring.stages.watch import StepClock, WatchedEngine, WatchedTrainer
    from sparring.store.sqlite import SqliteStore
    from sparring.train.config import TrainConfig

    steps, path = spec["warmup"] + spec["steps"], spec["model"]
    algo = GrpoConfig(zero_variance_filter=False)
    cluster = InlineCluster(
        models={"policy": ModelConfig(path=path)},
        train=TrainConfig(learning_rate=LEARNING_RATE, save_every=0),
        engine=EngineConfig(),
        device="cpu",
        threads=spec["threads"],
    )
    spans, native = Spans(), cluster.engine("policy", path=path)
    engine = WatchedEngine(native, spans)
    plan = TrainPlan(losses=[PolicyLoss(algo)], total_steps=steps, overrides={})
    trainer = WatchedTrainer(cluster.trainer("policy", path=path, plan=plan), spans)
    boxes = BubblewrapBoxes(SandboxConfig())
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as folder:
        store = SqliteStore(f"{folder}/store.sqlite")
        rollout = RolloutConfig(group_size=GROUP_SIZE, max_turn_tokens=NEW_TOKENS)
        # an id that no model samples, so that nothing stops early
        sampling = rollout.sampling(stop=(-1,))
        recorder = Recorder(engine, load_renderer(path), store, sampling=sampling, max_context=PROMPT_TOKENS + NEW_TOKENS)
        factory, window = world(spec["prompts"]), Window(GROUPS, 0, steps)
        runner = RolloutRunner(factory, boxes, recorder, ChatHarness(), rollout)
        scheduler = Scheduler(
            runner, factory.tasks("train", 0), window, run_seed=0, engine_version=lambda: engine.version
        )
        taken = Steps(lambda: native.metrics, StepClock(spans))

        async def after_step(step: Any, batch: Any, metrics: Mapping[str, float]) -> None:
            assert batch.account.trained == batch.account.sampled == GROUPS * GROUP_SIZE * NEW_TOKENS, batch.account
            store.metric("rl", step.version, {**metrics, **scheduler.metrics()})
            taken.add(metrics, batch.account.sampled)

        async with aclosing(scheduler.groups()) as groups:
            made = batches(
                groups,
                steps=range(1, steps + 1),
                groups_per_step=GROUPS,
                credit=load_credit(algo, seed=0),
                model="policy",
                store=store,
            )
            await run_loop(made, {"policy": trainer}, {"policy": engine}, window, after_step)
        store.close()
    await boxes.close()
    await cluster.close()
    return taken.rows[spec["warmup"] :]


def ours(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The measured steps, the machine's peak around them, and this process's largest resident memory."""
    import torch

    torch.set_num_threads(spec["threads"])
    before = peak_flops()
    rows = asyncio.run(train(spec))
    peak = max(before, peak_flops())
    return {"rows": rows, "peak_flops": peak, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


# In turns.


def environment(threads: int) -> dict[str, str]:
    """Of a measured process."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(command: list[object], threads: int) -> str:
    """Run a command to its end; what it printed. What it complained about is shown only if it failed."""
    done = subprocess.run([*map(str, command)], env=environment(threads), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\n{' '.join(map(str, command))}: expected exit status 0, got {done.returncode}")
    return done.stdout


def last_line(command: list[object], threads: int) -> dict[str, Any]:
    """The JSON object of a command's last line."""
    return json.loads(run(command, threads).strip().splitlines()[-1])


def floor_s(spec: Mapping[str, Any], peak: float) -> float:
    """Seconds that the step's matrix products alone would take."""
    tokens = GROUPS * GROUP_SIZE * NEW_TOKENS
    return (6 + 2) * spec["parameters"] * tokens / peak


def measure(size: str, spec: dict[str, Any], pairs: int, with_trl: bool) -> dict[str, Any]:
    """Alternate the two sides; figures by pair."""
    path = Path(spec["folder"]) / "spec.json"
    path.write_text(json.dumps(spec))
    me, peer = [sys.executable, __file__, "--role", "ours"], [PEER_VENV / "bin" / "python", PEER / "step.py"]
    run([sys.executable, __file__, "--role", "prepare", "--sizes", size, "--spec", path], spec["threads"])
    spec = json.loads(path.read_text())
    results = []
    for pair in range(pairs):
        mine = last_line([*me, "--spec", path], spec["threads"])
        step_s = statistics.median(row["step_s"] for row in mine["rows"])
        floor = floor_s(spec, mine["peak_flops"])
        result = {"ours_s": step_s, "floor_s": floor, "floors": step_s / floor, "peak_gflops": mine["peak_flops"] / 1e9}
        result["ours_peak_rss_bytes"] = mine["peak_rss_bytes"]
        if with_trl:
            theirs = last_line([*peer, path], spec["threads"])
            result["trl_s"] = statistics.median(theirs["step_s"])
            result["ratio"] = result["trl_s"] / step_s
            result["trl_cpu_s"] = statistics.median(theirs["cpu_s"])
            result["trl_peak_rss_bytes"] = theirs["peak_rss_bytes"]
        result["breakdown"] = {name: statistics.median(row[name] for row in mine["rows"]) for name in mine["rows"][0]}
        results.append(result)
        print(f"{size}, pair {pair + 1}: {line(result)}", flush=True)
    for name, value in results[-1]["breakdown"].items():
        print(f"    {name:22} {value:10.4f}", flush=True)
    return {"parameters": spec["parameters"], "pairs": results}


def line(result: Mapping[str, Any]) -> str:
    """One pair for people."""
    text = f"ours {result['ours_s']:.3f} s = {result['floors']:.2f} floors of {result['floor_s']:.3f} s"
    text += f" at {result['peak_gflops']:.0f} GFLOP/s"
    return text + (f"; TRL {result['trl_s']:.3f} s, {result['ratio']:.2f} times ours" if "trl_s" in result else "")


def claims(size: str, figures: Mapping[str, Any]) -> list[dict[str, object]]:
    """The medians over pairs, against their targets."""
    found = []
    if size in FLOORS:
        value = statistics.median(pair["floors"] for pair in figures["pairs"])
        found.append((f"RL step in arithmetic floors, {size}", value, "floors", FLOORS[size], "<="))
    if "ratio" in figures["pairs"][0]:
        value = statistics.median(pair["ratio"] for pair in figures["pairs"])
        found.append((f"RL step of TRL over ours, {size}", value, "x", FASTER[size], ">="))
    names = ("name", "value", "unit", "target", "direction")
    return [dict(zip(names, (n, round(v, 3), *rest), strict=True)) for n, v, *rest in found]


def main() -> None:
    """Measure in turns and print; or do what one `--role` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install the peer and stop")
    parser.add_argument("--sizes", default="A,quickstart")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-trl", action="store_true")
    parser.add_argument("--role", choices=("prepare", "ours"), help="one process of the measurement")
    parser.add_argument("--spec", type=Path, help="with --role")
    arguments = parser.parse_args()
    if arguments.role == "prepare":
        spec = json.loads(arguments.spec.read_text())
        arguments.spec.write_text(json.dumps(prepare(arguments.sizes, spec)))
        return
    if arguments.role == "ours":
        print(json.dumps(ours(json.loads(arguments.spec.read_text()))))
        return
    if arguments.setup or not arguments.without_trl:
        setup()
    if arguments.setup:
        return
    load_before, figures, made = os.getloadavg()[0], {}, []
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            spec = {"folder": folder, "warmup": arguments.warmup, "steps": arguments.steps, "threads": arguments.threads}
            spec |= {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "new_tokens": NEW_TOKENS}
            spec["learning_rate"] = LEARNING_RATE
            figures[size] = measure(size, spec, arguments.pairs, not arguments.without_trl)
        made += claims(size, figures[size])
    about = {"benchmark": "rl_step", "threads": arguments.threads, "load_before": load_before, "sizes": figures}
    print(json.dumps({**about, "claims": made}))


if __name__ == "__main__":
    main()
