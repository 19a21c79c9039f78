"""RL steps on one GPU at the sizes that others publish: seconds, calls of the engine, memory.

Random weights of a published shape in bfloat16 (speed does not ask for others); each prompt's group samples replies of
log-normal lengths, gets random advantages, and is trained in one optimiser step, whose weights are given to the engine.
Trainer and engine are those of a run, in one process; gateway, store and rewards are left out. A warm-up step, which
captures graphs, is not counted.

    0   SmolLM2-135M, 24 prompts x 8, two turns, the second as soon as the first has ended    1.5 s, 10 ms a call
    A   Qwen2.5-0.5B, 64 prompts x 5, 104 + 205 tokens up to 1,024, LoRA of rank 32           10 s
    B   1.5B, 32 prompts x 16, replies of up to 512, full weights                             60 s
    C   0.6B, full weights: the trainer alone, rows of 16k                                    12,000 tokens/s, difference 0
    D   7B with LoRA of rank 32, 4 prompts x 4: peak memory (A tells its own)                 told
    E   A with two engines; and whether an engine sleeps there (`cluster.colocate`)           works, told

Usage: python benchmarks/gpu_step.py [--rows 0,A,B,C,D,E] [--device cuda] [--steps 3]. Without a GPU it ends with status
2; `--short` runs every row with a tiny model on the CPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from common.figures import Claims, claim, read_options

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.denominators import denominators
from sparring.engine.config import BatchConfig, EngineConfig, KvConfig
from sparring.engine.native import NativeEngine
from sparring.errors import SparringError
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.model.attention import IMPLEMENTATION
from sparring.model.causal import CausalModel
from sparring.model.load import build_model
from sparring.model.lora import Adapter, fresh_state
from sparring.model.targets import targeted
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

BANNED = 0
"""Token that no prompt holds."""
LONG_ROWS = 16384
"""Tokens of a row of C, and the trainer's budget of a micro-batch."""


def shape(family: str, hidden: int, layers: int, heads: int, kv: int, mlp: int, vocabulary: int, *, tied: bool) -> Any:
    """Make a config of the library."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv, "tie_word_embeddings": tied}
    return transformers.AutoConfig.for_model(family, max_position_embeddings=LONG_ROWS + 16, **sizes, **heads_of)


SHAPES = {
    "tiny": ("qwen3", 64, 2, 4, 2, 128, 512, True),
    "135M": ("llama", 576, 30, 9, 3, 1536, 49152, True),
    "0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151936, True),
    "1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
}


@dataclass(frozen=True)
class Row:
    """A row of the table. Replies have exp(gauss(log(mean), 0.6)) tokens, at most `longest`."""

    shape: str
    prompts: int
    group: int
    prompt: int
    mean: int
    longest: int
    rank: int = 0
    turns: int = 1
    engines: int = 1
    seconds: float | None = None


ROWS = {
    "0": Row("135M", 24, 8, 43, 55, 128, turns=2, seconds=1.5),
    "A": Row("0.5B", 64, 5, 104, 205, 1024, rank=32, seconds=10.0),
    "B": Row("1.5B", 32, 16, 128, 205, 512, seconds=60.0),
    "D": Row("7B", 4, 4, 104, 205, 1024, rank=32),
    "E": Row("0.5B", 64, 5, 104, 205, 1024, rank=32, engines=2),
}
CALL_MS, LONG_TOKENS_PER_S = 10.0, 12000.0


class Setup:
    """Trainer and engines of a row; no tensor is shared between them."""

    def __init__(self, row: Row, device: str) -> None:
        self.row, self.device = row, device
        trained = self._model()
        if row.rank:
            names = targeted(trained.module, "all-linear", ())
            state = fresh_state(trained.module, names, row.rank, 1.0, 0)
            trained.adapters.everywhere = trained.adapters.fit(Adapter(state, trained.dtype, trained.device))
        config = TrainConfig(token_budget=LONG_ROWS, learning_rate=1e-6)
        losses = [PolicyLoss(AlgoConfig())]
        self.trainer = LocalTrainer(trained, config, losses, name="policy", total_steps=1000)
        running = row.prompts * row.group // row.engines
        tokens = running * (row.turns * (row.prompt + row.longest) + 16)
        served = EngineConfig(
            batch=BatchConfig(max_running=running, max_tokens=8192), kv=KvConfig(tokens=max(tokens, LONG_ROWS + 16))
        )
        self.engines = [NativeEngine(self._model(), served) for _ in range(row.engines)]

    def _model(self) -> CausalModel:
        family, *sizes, tied = SHAPES[self.row.shape]
        torch.manual_seed(0)
        with torch.device(self.device):
            module = transformers.AutoModelForCausalLM.from_config(
                shape(str(family), *map(int, sizes), tied=bool(tied)),
                dtype=torch.bfloat16,
                attn_implementation=IMPLEMENTATION,
            )
        return build_model(module, f"random {self.row.shape}", numerics="exact")

    async def push(self) -> float:
        """Give the trainer's weights to the engines; return the seconds."""
        begin, ref = time.perf_counter(), await self.trainer.push()
        await asyncio.gather(*(engine.pull(ref) for engine in self.engines))
        return time.perf_counter() - begin

    async def close(self) -> None:
        """Stop the threads."""
        await asyncio.gather(self.trainer.close(), *(engine.close() for engine in self.engines))


def sample_of(name: str, group: int, tokens: Sequence[int], marks: Sequence[Any], version: int) -> Sample:
    """Make a row to train; marks[i] is the log-probability with which tokens[i] was sampled, None for a given one."""
    advantage = random.Random(name).uniform(-1.0, 1.0)
    versions = tuple(-1 if mark is None else version for mark in marks)
    return Sample(
        id=name,
        group=str(group),
        source="policy",
        tokens=tuple(tokens),
        weights={"policy": tuple(0.0 if mark is None else 1.0 for mark in marks)},
        advantages=tuple(0.0 if mark is None else advantage for mark in marks),
        logprobs=tuple(0.0 if mark is None else mark for mark in marks),
        versions=versions,
        kv_versions=versions,
    )


async def rollout(setup: Setup, step: int, group: int, member: int) -> Sample:
    """Sample the replies of a conversation."""
    row, name = setup.row, f"{step}/{group}/{member}"
    engine = setup.engines[group % len(setup.engines)]
    random_prompt, random_length = random.Random(f"{step}/{group}"), random.Random(name)
    tokens: list[int] = []
    marks: list[float | None] = []
    for turn in range(row.turns):
        given = [random_prompt.randrange(BANNED + 1, 500) for _ in range(row.prompt)]
        length = max(1, min(row.longest, round(row.mean * 0.835 * random_length.lognormvariate(0.0, 0.6))))
        tokens, marks = [*tokens, *given], [*marks, *[None] * len(given)]
        asked = GenerateRequest(
            id=f"{name}/{turn}",
            tokens=tuple(tokens),
            sampling=Sampling(max_tokens=length, seed=hash((step, group, member, turn)) & 0xFFFF),
            conversation=name,
        )
        answer = await engine.generate(asked)
        tokens, marks = [*tokens, *answer.tokens], [*marks, *answer.logprobs]
    await engine.release(name)
    return sample_of(name, group, tokens, marks, engine.version)


async def train(setup: Setup, step: int, rows: Sequence[Sample]) -> dict[str, float]:
    """Make one optimiser step; return the trainer's metrics."""
    batch = Batch(step=step, model="policy", rows=tuple(rows), denominators=denominators(rows))
    found = dict(await setup.trainer.forward_backward(batch))
    return {**found, **(await setup.trainer.step()).metrics}


def busy(setup: Setup) -> tuple[float, float]:
    """Return calls and busy seconds of the engines."""
    metrics = [engine.metrics for engine in setup.engines]
    return sum(one.get("steps", 0.0) for one in metrics), sum(one.get("busy_s", 0.0) for one in metrics)


async def measure(row: Row, device: str, steps: int) -> dict[str, float]:
    """Medians over the steps of a row."""
    setup = Setup(row, device)
    if row.rank:  # the engines begin with the trainer's other weights
        await setup.push()
    seen: list[dict[str, float]] = []
    for step in range(steps + 1):
        calls, busy_s = busy(setup)
        begin = time.perf_counter()
        pairs = [(group, member) for group in range(row.prompts) for member in range(row.group)]
        rows = await asyncio.gather(*(rollout(setup, step, *pair) for pair in pairs))
        generated, (calls_then, busy_then) = time.perf_counter(), busy(setup)
        metrics = await train(setup, step + 1, rows)
        trained = time.perf_counter()
        push_s = await setup.push()
        seen.append(
            {
                "step_s": time.perf_counter() - begin,
                "generating_s": generated - begin,
                "training_s": trained - generated,
                "push_s": push_s,
                "calls": calls_then - calls,
                "call_ms": 1e3 * (busy_then - busy_s) / max(1.0, calls_then - calls),
                "tokens_per_s": sum(len(one.tokens) for one in rows) / (time.perf_counter() - begin),
                "difference": metrics["logprob_max_abs_diff"],
            }
        )
    await setup.close()
    return {name: statistics.median(one[name] for one in seen[1:]) for name in seen[0]}


async def measure_long(row: Row, device: str, steps: int, length: int) -> dict[str, float]:
    """Train rows of `length` tokens, whose log-probabilities the engine scores."""
    setup = Setup(row, device)
    tokens = tuple(random.Random(0).randrange(BANNED + 1, 500) for _ in range(length))
    scores = await setup.engines[0].score(ScoreRequest(id="0", tokens=tokens))
    sample = sample_of("0", 0, tokens, (None, *scores.logprobs[-(length - 1) :]), 0)
    first = await train(setup, 1, [sample])
    taken = []
    for step in range(steps):
        begin = time.perf_counter()
        await train(setup, step + 2, [sample])
        taken.append(time.perf_counter() - begin)
    await setup.close()
    return {"tokens_per_s": length / statistics.median(taken), "difference": first["logprob_max_abs_diff"]}


async def sleeps(row: Row, device: str) -> str:
    """Tell whether an engine sleeps on this device, as `cluster.colocate` needs."""
    setup = Setup(row, device)
    try:
        await setup.engines[0].sleep()
    except SparringError as refused:
        return str(refused)
    finally:
        await setup.close()
    return "sleeps"


def main() -> None:
    """Measure, print a line for each row, then the claims."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="0,A,B,C,D,E")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=3)
    arguments = read_options(parser, device="cpu", steps=1)
    device, tiny = arguments.device, arguments.short
    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu_step: expected a GPU and a torch built for it, got none; run it where there is one\n")
        raise SystemExit(2)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found: dict[str, dict[str, Any]] = {}
    claims: Claims = []
    small = {key: Row("tiny", 2, 2, 8, 6, 12, row.rank, row.turns, row.engines) for key, row in ROWS.items()}
    for key in arguments.rows.split(","):
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if key == "C":
            row = Row("tiny" if tiny else "0.6B", 1, 1, 8, 8, 8)
            found[key] = asyncio.run(measure_long(row, device, arguments.steps, 64 if tiny else LONG_ROWS))
            claims.append(claim("C: tokens/s", found[key]["tokens_per_s"], "tokens/s", LONG_TOKENS_PER_S, ">="))
        else:
            row = (small if tiny else ROWS)[key]
            found[key] = asyncio.run(measure(row, device, arguments.steps))
        if row.seconds is not None:
            claims.append(claim(f"{key}: step", found[key]["step_s"], "s", row.seconds))
        if key == "0":
            claims.append(claim("0: call of the engine", found[key]["call_ms"], "ms", CALL_MS))
        if key == "E":
            found[key]["colocate"] = asyncio.run(sleeps(Row(row.shape, 1, 1, 8, 8, 8), device))
        if device == "cuda":
            found[key]["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        claims.append(claim(f"{key}: difference of log-probabilities", found[key]["difference"], "", 0.0))
        print(key, {k: round(v, 4) if isinstance(v, float) else v for k, v in found[key].items()}, flush=True)
    print(json.dumps({"benchmark": "gpu_step", "device": name, "rows": found, "claims": claims}))


if __name__ == "__main__":
    main()
