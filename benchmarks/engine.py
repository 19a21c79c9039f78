"""Tokens per second of the native engine against `transformers` generate, measured in turns in one process.

    python benchmarks/engine.py [--model A] [--dtypes float32,bfloat16] [--concurrency 1,8,32,128] [--repeats 3] [--threads 2]

Model A of the field notes: Qwen3 architecture, hidden 256, 6 layers, 4 heads, 2 KV heads, head size 64, intermediate 768,
vocabulary 4096, untied (7.3M parameters); model `quickstart` is the size of the quickstart's policy. Prompts of 64 random
tokens, 256 new ones, no stop, temperature 1, every prompt different, prefill included. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time

import torch
import transformers

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.types import GenerateRequest, Sampling

MODELS = {
    "A": (
        InitConfig(
            hidden_size=256,
            num_layers=6,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            intermediate_size=768,
            max_positions=2048,
            tie_embeddings=False,
        ),
        4096,
    ),
    "quickstart": (InitConfig(hidden_size=160, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=40, intermediate_size=480), 2048),
}
PROMPT, NEW = 64, 256
TARGETS = {1: 1.5, 8: 2.5, 32: 2.5, 128: 2.5}


def prompts(count: int, vocabulary: int, seed: int) -> torch.Tensor:
    """[count, PROMPT] random tokens."""
    return torch.randint(vocabulary, (count, PROMPT), generator=torch.Generator().manual_seed(seed))


def native_rate(engine: NativeEngine, tokens: torch.Tensor) -> float:
    """Generated tokens per second of `len(tokens)` requests at once."""

    async def everyone() -> float:
        requests = [
            GenerateRequest(id=str(i), tokens=tuple(row), sampling=Sampling(max_tokens=NEW, seed=i))
            for i, row in enumerate(tokens.tolist())
        ]
        started = time.perf_counter()
        answers = await asyncio.gather(*map(engine.generate, requests))
        return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - started)

    return asyncio.run(everyone())


@torch.inference_mode()
def library_rate(module: torch.nn.Module, tokens: torch.Tensor) -> float:
    """The same by `generate`: dynamic cache, SDPA, one batch (prompts of one length: nothing to pad)."""
    settings = transformers.GenerationConfig(
        do_sample=True, top_k=0, temperature=1.0, max_new_tokens=NEW, min_new_tokens=NEW, use_cache=True, pad_token_id=0
    )
    started = time.perf_counter()
    out = module.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    return (out.shape[0] * (out.shape[1] - PROMPT)) / (time.perf_counter() - started)


def measure(folder: str, dtype: str, counts: list[int], repeats: int, threads: int) -> dict[int, tuple[float, float]]:
    """Median tokens per second of (native engine, library) by concurrency."""
    engine = NativeEngine(load(folder, dtype=dtype), EngineConfig(), threads=threads)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    module.eval()
    vocabulary = module.config.vocab_size
    native_rate(engine, prompts(2, vocabulary, 99))
    library_rate(module, prompts(2, vocabulary, 99))
    rates = {}
    for count in counts:
        ours, theirs = [], []
        for turn in range(repeats):
            tokens = prompts(count, vocabulary, turn)
            ours.append(native_rate(engine, tokens))
            theirs.append(library_rate(module, tokens))
        rates[count] = (statistics.median(ours), statistics.median(theirs))
        print(f"{dtype} x {count}: native {rates[count][0]:.0f}, generate {rates[count][1]:.0f} tokens/s", flush=True)
    asyncio.run(engine.close())
    return rates


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="A")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--concurrency", default="1,8,32,128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    init, vocabulary = MODELS[arguments.model]
    counts = [int(count) for count in arguments.concurrency.split(",")]
    claims, rates = [], {}
    with tempfile.TemporaryDirectory() as folder:
        create(init, vocabulary, folder, 0)
        for dtype in arguments.dtypes.split(","):
            rates[dtype] = measure(folder, dtype, counts, arguments.repeats, arguments.threads)
            for count, (ours, theirs) in rates[dtype].items():
                name = f"engine over generate, model {arguments.model}, {dtype}, concurrency {count}"
                value, target = round(ours / theirs, 2), TARGETS.get(count, 2.5)
                claims.append({"name": name, "value": value, "unit": "x", "target": target, "direction": ">="})
    tokens_per_s = {d: {c: {"native": round(a, 1), "generate": round(b, 1)} for c, (a, b) in r.items()} for d, r in rates.items()}
    print(json.dumps({"benchmark": "engine", "model": arguments.model, "tokens_per_s": tokens_per_s, "claims": claims}))


if __name__ == "__main__":
    main()
