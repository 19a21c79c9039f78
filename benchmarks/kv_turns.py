"""What each policy for KV between turns costs and saves: conversations of 20 turns, more of them than the cache holds.

    python benchmarks/kv_turns.py [--conversations 12] [--room 4] [--turns 20] [--rounds 3] [--threads 2]

Model A of benchmarks/engine.py in float32. A conversation begins with 200 tokens; a turn samples 20 and gets 60 more as
its observation, after 0 to 100 ms in which others run. The cache has room for 4 of 12 conversations at full length.
Policies: nothing (drop, no prefix is found), drop, keep, offload; in turns, in one process, on an engine of its own
each. All of them must sample the same tokens with the same log-probabilities. The last line is one JSON object; ratios
are medians over the rounds.
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

from sparring.engine.config import EngineConfig, KvConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load

PROMPT, SAMPLED, OBSERVED, THINK_S = 200, 20, 60, 0.1
POLICIES: dict[str, dict[str, Any]] = {
    "nothing": {"across_turns": "drop", "share_prefixes": False},
    "drop": {"across_turns": "drop"},
    "keep": {"across_turns": "keep"},
    "offload": {"across_turns": "offload"},
}
# processor time of a policy over that of "nothing": the clock would count whatever else the machine does
TARGETS = {"keep": 1.0, "offload": 0.5}
Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]


async def talk(engine: NativeEngine, number: int, turns: int, vocabulary: int, waits: list[float]) -> Answers:
    """A conversation; seconds of every turn go into `waits`."""
    draw, answers = random.Random(number), []
    tokens = [draw.randrange(vocabulary) for _ in range(PROMPT)]
    await asyncio.sleep(draw.random() * THINK_S)
    for turn in range(turns):
        sampling = Sampling(max_tokens=SAMPLED, seed=draw.randrange(1 << 40))
        item = GenerateRequest(id=f"{number}.{turn}", tokens=tuple(tokens), sampling=sampling, conversation=str(number))
        started = time.perf_counter()
        answer = await engine.generate(item)
        waits.append(time.perf_counter() - started)
        answers.append((answer.tokens, answer.logprobs))
        tokens += [*answer.tokens, *(draw.randrange(vocabulary) for _ in range(OBSERVED))]
        await asyncio.sleep(draw.random() * THINK_S)
    await engine.release(str(number))
    return answers


async def once(
    folder: str, settings: dict[str, Any], arguments: argparse.Namespace
) -> tuple[dict[str, float], list[Answers]]:
    """Figures of one policy on a fresh engine, and what was sampled."""
    longest = PROMPT + arguments.turns * (SAMPLED + OBSERVED)
    config = EngineConfig(kv=KvConfig(**settings, tokens=arguments.room * longest))
    engine = NativeEngine(load(folder), config, threads=arguments.threads)
    vocabulary, waits = MODELS["A"][1]["vocabulary"], list[float]()
    await engine.generate(GenerateRequest(id="warm", tokens=(1, 2, 3), sampling=Sampling(max_tokens=50)))
    before, started, cpu = engine.metrics, time.perf_counter(), time.process_time()
    talks = (talk(engine, number, arguments.turns, vocabulary, waits) for number in range(arguments.conversations))
    answers = await asyncio.gather(*talks)
    figures = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    names = (
        "busy_s",
        "prefill_tokens",
        "kv_kept_tokens",
        "kv_shared_tokens",
        "kv_restored_tokens",
        "kv_hits",
        "kv_evictions",
    )
    after = engine.metrics
    figures |= {name: after[name] - before.get(name, 0.0) for name in (*names, "kv_out_bytes", "kv_back_bytes")}
    figures |= {"turn_s": statistics.median(waits), "slow_turn_s": statistics.quantiles(waits, n=10)[-1]}
    figures |= {"max_kv_bytes": after["max_kv_bytes"], "copy_s": after["kv_copy_s"]}
    await engine.close()
    return figures, answers


def show(figures: dict[str, list[dict[str, float]]]) -> None:
    """A table of medians."""
    print(
        "policy   wall s     cpu s  turn ms  p90 ms  prefilled      kept  restored    shared  evicted  out MB  back MB  copies s"
    )
    for name, rounds in figures.items():
        m = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        tokens = "".join(f"{m[key]:10,.0f}" for key in ("kv_kept_tokens", "kv_restored_tokens", "kv_shared_tokens"))
        print(
            f"{name:8}{m['wall_s']:7.2f}{m['cpu_s']:10.2f}{1e3 * m['turn_s']:9.0f}{1e3 * m['slow_turn_s']:8.0f}"
            f"{m['prefill_tokens']:11,.0f}{tokens}{m['kv_evictions']:9.0f}"
            f"{m['kv_out_bytes'] / 1e6:8.0f}{m['kv_back_bytes'] / 1e6:9.0f}{m['copy_s']:10.3f}"
        )


def claims(figures: dict[str, list[dict[str, float]]], turns: int) -> list[dict[str, object]]:
    """Each policy over "nothing"."""
    found = []
    for name, target in TARGETS.items():
        ratio = statistics.median(
            a["cpu_s"] / b["cpu_s"] for a, b in zip(figures[name], figures["nothing"], strict=True)
        )
        text = (
            f"{turns} turns, more conversations than the cache holds: {name} over prefilling every turn, processor time"
        )
        found.append({"name": text, "value": round(ratio, 3), "unit": "x", "target": target, "direction": "<="})
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--room", type=int, default=4, help="conversations of full length that the cache holds")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = read_options(parser, conversations=2, room=1, turns=2, rounds=1)
    torch.set_num_threads(arguments.threads)
    shape, spec = MODELS["A"]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        create(InitConfig(**shape), spec["vocabulary"], folder, 0)
        expected = None
        for _ in range(arguments.rounds):
            for name, settings in POLICIES.items():
                found, answers = asyncio.run(once(folder, settings, arguments))
                expected = expected or answers
                assert answers == expected, f"{name} samples other tokens"
                figures[name].append(found)
    show(figures)
    print(json.dumps({"benchmark": "kv_turns", "figures": figures, "claims": claims(figures, arguments.turns)}))


if __name__ == "__main__":
    main()
