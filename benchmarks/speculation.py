"""What speculation is worth on a run's own text: its recorded turns sampled again with it and without, in turns, bit
for bit the same.

    python benchmarks/speculation.py runs/quickstart [--checkpoint FOLDER] [--dtype float32] [--concurrency 1] [--turns
                                     96] [--repeats 3] [--threads 2] [--tokens 4]

Prompts are found in the cache but for the first lap, as in a group. They and the settings are those of turns spread
over the run's training rollouts; the checkpoint is the run's last one unless another is named, whose tokenizer must be
the run's. The last line is one JSON object: medians over the repeats; `cpu_ratio` is the same of processor time, for a
machine that others use too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest
from sparring.model.load import load
from sparring.rollout.replay import prompt_of
from sparring.store.sqlite import SqliteStore


def recorded(run: Path, count: int) -> list[GenerateRequest]:
    """The requests of `count` turns of the training rollouts, evenly spaced."""
    store = SqliteStore(run / "store.sqlite", read_only=True)
    found = [
        GenerateRequest(
            id=f"{trajectory.id}#{segment.index}", tokens=prompt_of(trajectory, segment), sampling=segment.sampling
        )
        for group in store.groups(stage="rl")
        for rollout in group.rollouts
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.sampling is not None
    ]
    store.close()
    return found[:: max(1, len(found) // count)][:count]


async def lap(
    engine: NativeEngine, requests: list[GenerateRequest], concurrency: int
) -> tuple[float, float, list[object]]:
    """Tokens a second, also of processor time, and what was sampled."""
    limit = asyncio.Semaphore(concurrency)

    async def one(request: GenerateRequest) -> object:
        async with limit:
            return await engine.generate(request)

    started, worked = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*map(one, requests))
    count = sum(len(answer.tokens) for answer in answers)
    return count / (time.perf_counter() - started), count / (time.process_time() - worked), answers


async def measured(arguments: argparse.Namespace) -> dict[str, object]:
    """Both engines in turns over the same requests."""
    requests = recorded(arguments.run, arguments.turns)
    folder = str(arguments.checkpoint or arguments.run / "rl" / "model")
    config = {"speculation_tokens": arguments.tokens}
    engines = {
        name: NativeEngine(
            load(folder, dtype=arguments.dtype), EngineConfig(speculation=name, **config), threads=arguments.threads
        )
        for name in ("off", "ngram")
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for repeat in range(arguments.repeats + 1):
        laps = {name: await lap(engine, requests, arguments.concurrency) for name, engine in engines.items()}
        assert _without_cache(laps["off"][2]) == _without_cache(laps["ngram"][2]), (
            "speculation changed what was sampled"
        )
        for name, (*rate, _) in laps.items() if repeat else ():
            rates[name].append(rate)
    counted = engines["ngram"].metrics
    for engine in engines.values():
        await engine.close()
    return {
        "tokens_per_s": {name: round(statistics.median(wall for wall, _ in values)) for name, values in rates.items()},
        **{
            name: round(statistics.median(b[i] / a[i] for a, b in zip(rates["off"], rates["ngram"], strict=True)), 3)
            for i, name in enumerate(("ratio", "cpu_ratio"))
        },
        "accepted": round(counted["accepted_tokens"] / max(1, counted["drafted_tokens"]), 3),
        "tokens_per_step": round(counted["generated_tokens"] / counted["steps"], 2),
    }


def _without_cache(answers: list[object]) -> list[object]:
    return [replace(answer, cached_tokens=0) for answer in answers]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--turns", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()[0]
    figures = asyncio.run(measured(arguments))
    settings = {name: getattr(arguments, name) for name in ("dtype", "concurrency", "threads", "tokens", "turns")}
    print(json.dumps({"benchmark": "speculation", "load_before": load_before, **settings, **figures}))


if __name__ == "__main__":
    main()
