"""What adapters cost the engine: tokens per second of a crowd without one, under one, and under several at once.

    python benchmarks/adapters.py [--count 32] [--rank 16] [--adapters 1,4] [--new 128] [--rounds 7] [--threads 2]
    [--dtype float32]

Model A of benchmarks/engine.py, adapters of all its linear layers, prompts of 64 random tokens, every prompt different.
All requests arrive at once; those of several adapters are dealt out in turns. A round is one crowd of each kind, one
after another on one engine; figures are the best round of each. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from common.figures import read_options
from common.tiny_adapters import tiny_adapter
from engine import MODELS

from sparring.engine.config import EngineConfig, KvConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.model.peft import read
from sparring.weights.inline import publish

PROMPT = 64


async def rate(engine: NativeEngine, draw: random.Random, adapters: int, arguments: argparse.Namespace) -> float:
    """Tokens per second of one crowd."""
    vocabulary = MODELS["A"][1]["vocabulary"]
    requests = [
        GenerateRequest(
            id=str(i),
            tokens=tuple(draw.randrange(vocabulary) for _ in range(PROMPT)),
            sampling=Sampling(max_tokens=arguments.new, seed=i),
            adapter=f"adapter {i % adapters}" if adapters else None,
        )
        for i in range(arguments.count)
    ]
    started = time.perf_counter()
    await asyncio.gather(*map(engine.generate, requests))
    tokens: int = arguments.count * arguments.new
    return tokens / (time.perf_counter() - started)


async def measure(engine: NativeEngine, folder: Path, arguments: argparse.Namespace) -> dict[int, list[float]]:
    """Tokens per second by number of adapters, round by round."""
    kinds = [0, *map(int, arguments.adapters.split(","))]
    for number in range(max(kinds)):
        path = tiny_adapter(folder / "base", folder / str(number), seed=number, rank=arguments.rank)
        await engine.pull(publish("policy", 1, read(path), adapter=f"adapter {number}"))
    draw = random.Random(0)
    rates: dict[int, list[float]] = {kind: [] for kind in kinds}
    for _ in range(arguments.rounds + 1):  # the first warms up
        for kind in kinds:
            rates[kind].append(await rate(engine, draw, kind, arguments))
    await engine.close()
    return {kind: found[1:] for kind, found in rates.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", default="1,4")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = read_options(parser, count=4, new=8, rounds=1)
    torch.set_num_threads(arguments.threads)
    shape, spec = MODELS["A"]
    with tempfile.TemporaryDirectory() as folder:
        base = create(InitConfig(**shape), spec["vocabulary"], Path(folder) / "base", 0)
        config = EngineConfig(kv=KvConfig(bytes=spec["kv_bytes"]))
        engine = NativeEngine(load(base, dtype=arguments.dtype), config, threads=arguments.threads)
        rates = asyncio.run(measure(engine, Path(folder), arguments))
    best = {kind: max(found) for kind, found in rates.items()}
    for kind, found in best.items():
        print(f"{kind} adapters: {found:,.0f} tokens/s, {found / best[0]:.2f} of none")
    claims = [
        {
            "name": f"{arguments.count} requests under {kind} adapters over none",
            "value": round(found / best[0], 3),
            "unit": "x",
        }
        for kind, found in best.items()
        if kind
    ]
    print(json.dumps({"benchmark": "adapters", "tokens_per_s": rates, "settings": vars(arguments), "claims": claims}))


if __name__ == "__main__":
    main()
