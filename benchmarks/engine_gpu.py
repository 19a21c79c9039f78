"""Tokens per second of the engine on a GPU, and the share of the memory-bandwidth limit that its decode steps reach.

Qwen3 shapes of 0.6B and 8B parameters with random weights, bfloat16; prompts of 128 tokens, 128 new ones, every prompt
different. A decode step must read every weight once (not the embedding, of which it reads a row for each sequence) and
the keys and values of every sequence: those bytes, over the bandwidth of a copy of 4 GB on the same device (bytes read
plus written), are the limit's time. A step's time is what 128 tokens take above what 1 token takes, over 127. Medians
of turns after one that warms up; graphs of sizes that come up later are captured within a turn.

Usage: python benchmarks/engine_gpu.py [--shapes 0.6B,8B] [--concurrency 1,64,256] [--numerics exact,fast] [--device
cuda] Without a GPU it ends with status 2; `--device cpu --shapes tiny` tries the script out. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from common.figures import read_options

from sparring.engine.config import BatchConfig, EngineConfig, KvConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.kernels.pages import token_bytes
from sparring.model.attention import IMPLEMENTATION
from sparring.model.causal import CausalModel
from sparring.model.load import build_model

SHARE = 0.6
"""Aim: this share of the limit in decode."""
SHAPES = {
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                 intermediate_size=128, vocab_size=512, tie_word_embeddings=True),
    "0.6B": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                 intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
               intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False),
}  # fmt: skip
"""Fields of the library's Qwen3 config."""


def model_of(shape: str, device: str, numerics: str) -> CausalModel:
    """Random weights: speed does not ask for others."""
    config = transformers.AutoConfig.for_model("qwen3", max_position_embeddings=4096, **SHAPES[shape])
    torch.manual_seed(0)
    with torch.device(device):
        module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION
        )
    return build_model(module, f"random {shape}", numerics=numerics)


def wait(device: str) -> None:
    """Until the device has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy, the best of ten."""
    size = (4 << 30) if device == "cuda" else (64 << 20)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = 0.0
    for _ in range(10):
        wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        wait(device)
        best = max(best, 2 * size / (time.perf_counter() - begin))
    return best


def bytes_of_a_step(model: CausalModel, concurrency: int, context: float) -> float:
    """What one decode step has to read at this mean context."""
    weights: float = sum(tensor.nbytes for tensor in model.state().values())
    if not model.config.tie_word_embeddings:
        embedding: Any = model.module.get_input_embeddings()
        weights -= embedding.weight.nbytes
    return weights + concurrency * context * token_bytes(model.kv_heads, model.dtype)


async def seconds(engine: NativeEngine, concurrency: int, prompt: int, new: int, turn: int) -> float:
    """From the first request until the last answer."""
    requests = [
        GenerateRequest(
            id=f"{turn}/{new}/{i}",
            tokens=tuple((turn * 7919 + i * 131 + place * 17 + new) % 500 for place in range(prompt)),
            sampling=Sampling(max_tokens=new, seed=turn * 1000 + i, temperature=1.0),
        )
        for i in range(concurrency)
    ]
    begin = time.perf_counter()
    answers = await asyncio.gather(*map(engine.generate, requests))
    taken = time.perf_counter() - begin
    if {len(answer.tokens) for answer in answers} != {new}:
        raise RuntimeError(f"engine_gpu: expected {new} tokens of every request, got others; measure nothing by this")
    return taken


async def measure(
    model: CausalModel, concurrency: int, bandwidth: float, prompt: int, new: int, turns: int
) -> dict[str, float]:
    """Tokens per second, milliseconds of a decode step, and its share of the limit."""
    cache = 2 * concurrency * (prompt + new + 16)
    config = EngineConfig(
        batch=BatchConfig(max_running=concurrency, max_tokens=max(8192, concurrency)),
        kv=KvConfig(tokens=cache, across_turns="drop"),
    )
    engine = NativeEngine(model, config, threads=torch.get_num_threads())
    whole, first = [], []
    for turn in range(turns + 1):  # the first compiles and captures
        whole.append(await seconds(engine, concurrency, prompt, new, turn))
        first.append(await seconds(engine, concurrency, prompt, 1, turn))
    await engine.close()
    total, prefill = statistics.median(whole[1:]), statistics.median(first[1:])
    step = max(total - prefill, 1e-9) / (new - 1)
    limit = bytes_of_a_step(model, concurrency, prompt + new / 2) / bandwidth
    return {
        "tokens_per_s": concurrency * new / total,
        "decode_tokens_per_s": concurrency / step,
        "step_ms": 1e3 * step,
        "limit_ms": 1e3 * limit,
        "share_of_limit": limit / step,
        "prefill_s": prefill,
    }


def main() -> None:
    """Measure, print a line for each case, then the claims."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="0.6B,8B")
    parser.add_argument("--concurrency", default="1,64,256")
    parser.add_argument("--numerics", default="exact,fast")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    arguments = read_options(parser, device="cpu", shapes="tiny", concurrency="1,2", prompt=16, new=8, turns=1)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("engine_gpu: expected a GPU and a torch built for it, got none; run it where there is one\n")
        raise SystemExit(2)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    bandwidth = copy_bandwidth(arguments.device)
    print(f"{name}: a copy reads and writes {bandwidth / 1e9:.0f} GB/s")
    found: dict[str, dict[str, float]] = {}
    claims = []
    for shape in arguments.shapes.split(","):
        for numerics in arguments.numerics.split(","):
            model = model_of(shape, arguments.device, numerics)
            for concurrency in map(int, arguments.concurrency.split(",")):
                case = f"{shape} {numerics} {concurrency}"
                sizes = (arguments.prompt, arguments.new, arguments.turns)
                found[case] = asyncio.run(measure(model, concurrency, bandwidth, *sizes))
                print(case, {key: round(value, 3) for key, value in found[case].items()}, flush=True)
                if numerics == "exact":
                    share = {"value": round(found[case]["share_of_limit"], 3), "unit": "x", "target": SHARE}
                    claims.append(
                        {"name": f"share of the bandwidth limit, {shape} at {concurrency}", **share, "direction": ">="}
                    )
            del model
    print(
        json.dumps(
            {"benchmark": "engine_gpu", "device": name, "bandwidth": bandwidth, "cases": found, "claims": claims}
        )
    )


if __name__ == "__main__":
    main()
