"""One engine in a process of its own, for benchmarks/engine.py: it makes the same tokens as the others, whichever
Python runs it.

    PYTHON benchmarks/peers/engines.py SIDE SPEC.json

Prints {"start_s"} when it is ready, seconds since the process began to load it. Then for each line {"count", "seed"} on
its standard input: `count` requests at once, every prompt different, prefill included, one such crowd after another
until they took `turn_s` seconds together, and {"tokens_per_s"}.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts], int]


def prompts(spec: dict[str, Any], count: int, seed: int | str) -> Prompts:
    """`count` rows of random tokens, others for each seed."""
    draw = random.Random(seed)
    return [[draw.randrange(spec["vocabulary"]) for _ in range(spec["prompt"])] for _ in range(count)]


def native(spec: dict[str, Any], numerics: str = "exact") -> Generate:
    """Ours, in one of its numerics."""
    from sparring.engine.config import EngineConfig, KvConfig
    from sparring.engine.native import NativeEngine
    from sparring.generation import GenerateRequest, Sampling
    from sparring.model.load import load

    config = EngineConfig(kv=KvConfig(bytes=spec["kv_bytes"]))
    engine = NativeEngine(load(spec["model"], dtype=spec["dtype"], numerics=numerics), config, threads=spec["threads"])

    async def everyone(rows: Prompts) -> int:
        requests = [
            GenerateRequest(id=str(i), tokens=tuple(row), sampling=Sampling(max_tokens=spec["new"], seed=i))
            for i, row in enumerate(rows)
        ]
        return sum(len(answer.tokens) for answer in await asyncio.gather(*map(engine.generate, requests)))

    return lambda rows: asyncio.run(everyone(rows))


def fast(spec: dict[str, Any]) -> Generate:
    """Ours with the library's own layers."""
    return native(spec, "fast")


def remote(spec: dict[str, Any]) -> Generate:
    """Ours behind `sparring serve`, in a process of its own."""
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.generation import GenerateRequest, Sampling

    settings = ["--port", "0", "--dtype", spec["dtype"], "--threads", str(spec["threads"])]
    command = [sys.executable, "-m", "sparring.cli.main", "serve", spec["model"], *settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    engine, runner = RemoteEngine(server.stdout.readline().split()[-1]), asyncio.Runner()

    async def everyone(rows: Prompts) -> int:
        requests = [
            GenerateRequest(id=str(i), tokens=tuple(row), sampling=Sampling(max_tokens=spec["new"], seed=i))
            for i, row in enumerate(rows)
        ]
        return sum(len(answer.tokens) for answer in await asyncio.gather(*map(engine.generate, requests)))

    return lambda rows: runner.run(everyone(rows))


def _library(spec: dict[str, Any], attention: str) -> tuple[Any, Any, Any]:
    """The library, the module, and settings that never stop early."""
    import torch
    import transformers

    torch.set_num_threads(spec["threads"])
    module = transformers.AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=getattr(torch, spec["dtype"]), attn_implementation=attention
    ).eval()
    settings = {
        "do_sample": True,
        "top_k": 0,
        "temperature": 1.0,
        "max_new_tokens": spec["new"],
        "pad_token_id": 0,
        "eos_token_id": -1,
    }
    return torch, module, transformers.GenerationConfig(use_cache=True, **settings)


def generate(spec: dict[str, Any]) -> Generate:
    """`transformers` generate: dynamic cache, SDPA, one batch (prompts of one length: nothing to pad)."""
    torch, module, settings = _library(spec, "sdpa")

    def run(rows: Prompts) -> int:
        tokens = torch.tensor(rows)
        with torch.inference_mode():
            out = module.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
        return int(out.shape[0] * (out.shape[1] - tokens.shape[1]))

    return run


def continuous(spec: dict[str, Any]) -> Generate:
    """`transformers` continuous batching."""
    torch, module, settings = _library(spec, "paged|sdpa")

    def run(rows: Prompts) -> int:
        with torch.inference_mode():
            found = module.generate_batch(rows, generation_config=settings, warmup=False)
        return sum(len(answer.generated_tokens) for answer in found.values())

    return run


def vllm(spec: dict[str, Any]) -> Generate:
    """vLLM in this process, compiled, without a prefix cache."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        spec["model"],
        dtype=spec["dtype"],
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=spec["kv_bytes"],
        max_num_seqs=256,
        disable_log_stats=True,
    )
    sampling = SamplingParams(temperature=1.0, max_tokens=spec["new"], ignore_eos=True, detokenize=False)

    def run(rows: Prompts) -> int:
        answers = engine.generate([{"prompt_token_ids": row} for row in rows], sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return run


SIDES = {
    "native": native,
    "remote": remote,
    "native_fast": fast,
    "generate": generate,
    "continuous": continuous,
    "vllm": vllm,
}


def main() -> None:
    """Load, then one turn for each line."""
    spec, started = json.loads(Path(sys.argv[2]).read_text()), time.perf_counter()
    # what a library prints on its way must not stand between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = SIDES[sys.argv[1]](spec)
    print(json.dumps({"start_s": time.perf_counter() - started}), file=answers, flush=True)
    for line in sys.stdin:
        ask, made, took = json.loads(line), 0, 0.0
        for crowd in itertools.count():
            # never a beginning that an engine may have kept of another crowd
            rows = prompts(spec, ask["count"], f"{ask['count']} {ask['seed']} {crowd}")
            began = time.perf_counter()
            found = run(rows)
            took, made = took + time.perf_counter() - began, made + found
            assert found == ask["count"] * spec["new"], f"expected {ask['count'] * spec['new']} tokens, got {found}"
            if took >= spec["turn_s"]:
                break
        print(json.dumps({"tokens_per_s": made / took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
