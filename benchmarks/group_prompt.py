"""What a group costs over its prompt: 16 requests with one prompt of 2,000 tokens, against one request.

    python benchmarks/group_prompt.py [--size 16] [--prompt 2000] [--rounds 9] [--threads 2]

Model A of benchmarks/engine.py in float32. All requests arrive at once and sample one token each; the prompt is computed once and
found by the others. A round is a new prompt for one request and a new one for the group, in turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time

import torch
from engine import MODELS

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load

TARGET = 1.2


async def seconds(engine: NativeEngine, prompt: tuple[int, ...], size: int) -> float:
    """Until the last of `size` requests has its token."""
    requests = [GenerateRequest(id=str(i), tokens=prompt, sampling=Sampling(max_tokens=1, seed=i)) for i in range(size)]
    started = time.perf_counter()
    await asyncio.gather(*map(engine.generate, requests))
    return time.perf_counter() - started


async def measure(engine: NativeEngine, vocabulary: int, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of one request and of a group, round by round."""
    draw = random.Random(0)
    alone, group = [], []
    for _ in range(arguments.rounds + 1):  # the first warms up
        for taken, size in ((alone, 1), (group, arguments.size)):
            prompt = tuple(draw.randrange(vocabulary) for _ in range(arguments.prompt))
            taken.append(await seconds(engine, prompt, size))
    await engine.close()
    return alone[1:], group[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, spec = MODELS["A"]
    with tempfile.TemporaryDirectory() as folder:
        create(InitConfig(**{**shape, "max_positions": 2 * arguments.prompt}), spec["vocabulary"], folder, 0)
        engine = NativeEngine(load(folder), EngineConfig(), threads=arguments.threads)
        alone, group = asyncio.run(measure(engine, spec["vocabulary"], arguments))
    ratio = statistics.median(b / a for a, b in zip(alone, group, strict=True))
    print(f"one request {statistics.median(alone):.3f} s, {arguments.size} requests {statistics.median(group):.3f} s")
    name = f"prefill of a group of {arguments.size} over that of one, prompt of {arguments.prompt}"
    claim = {"name": name, "value": round(ratio, 3), "unit": "x", "target": TARGET, "direction": "<="}
    print(json.dumps({"benchmark": "group_prompt", "one_s": alone, "group_s": group, "claims": [claim]}))


if __name__ == "__main__":
    main()
