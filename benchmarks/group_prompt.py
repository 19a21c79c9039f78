"""What a group costs over its prompt: 16 requests with one prompt of 2,000 tokens, against one request.

    python benchmarks/group_prompt.py [--models A,recurrent] [--size 16] [--prompt 2000] [--rounds 9] [--threads 2]

Model A of benchmarks/engine.py in float32, and a Qwen3.5 of about its size, whose recurrent state is copied. All
requests arrive at once and sample one token each; the prompt is computed once and found by the others. A round is a new
prompt for one request and a new one for the group, in turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from common.figures import read_options
from engine import MODELS

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.causal import CausalModel
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model

TARGET = 1.2
RECURRENT: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "head_dim": 64,
}


async def seconds(engine: NativeEngine, prompt: tuple[int, ...], size: int) -> float:
    """Until the last of `size` requests has its token."""
    requests = [GenerateRequest(id=str(i), tokens=prompt, sampling=Sampling(max_tokens=1, seed=i)) for i in range(size)]
    started = time.perf_counter()
    await asyncio.gather(*map(engine.generate, requests))
    return time.perf_counter() - started


async def measure(
    engine: NativeEngine, vocabulary: int, arguments: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Seconds of one request and of a group, round by round."""
    draw = random.Random(0)
    alone, group = list[float](), list[float]()
    for _ in range(arguments.rounds + 1):  # the first warms up
        for taken, size in ((alone, 1), (group, arguments.size)):
            prompt = tuple(draw.randrange(vocabulary) for _ in range(arguments.prompt))
            taken.append(await seconds(engine, prompt, size))
    await engine.close()
    return alone[1:], group[1:]


def model_of(name: str, longest: int, folder: str) -> CausalModel:
    """A model whose context is `longest`."""
    if name == "recurrent":
        return load(tiny_model("qwen3_5_text", folder, max_position_embeddings=longest, **RECURRENT), numerics="fast")
    shape, spec = MODELS[name]
    create(InitConfig(**{**shape, "max_positions": longest}), spec["vocabulary"], folder, 0)
    return load(folder)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="A,recurrent")
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = read_options(parser, prompt=64, size=2, rounds=1)
    torch.set_num_threads(arguments.threads)
    figures, claims = {}, []
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            loaded = model_of(model, 2 * arguments.prompt, folder)
            engine = NativeEngine(loaded, EngineConfig(), threads=arguments.threads)
            alone, group = asyncio.run(measure(engine, loaded.vocab_size, arguments))
        ratio = statistics.median(b / a for a, b in zip(alone, group, strict=True))
        one, all_of_them = statistics.median(alone), statistics.median(group)
        print(f"{model}: one request {one:.3f} s, {arguments.size} requests {all_of_them:.3f} s")
        figures[model] = {"one_s": alone, "group_s": group}
        name = f"{model}: prefill of a group of {arguments.size} over that of one, prompt of {arguments.prompt}"
        claims.append({"name": name, "value": round(ratio, 3), "unit": "x", "target": TARGET, "direction": "<="})
    print(json.dumps({"benchmark": "group_prompt", **figures, "claims": claims}))


if __name__ == "__main__":
    main()
