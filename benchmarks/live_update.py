"""How long a weight update holds up requests under way: the longest gap between two pieces of a stream across an
update.

    python benchmarks/live_update.py [--streams 32] [--updates 20] [--every 60] [--threads 2]

Model A of benchmarks/engine.py in float32. 32 requests are streamed; after every 60 tokens of each the engine pulls
weights, staged, verified by their checksum and by a probe of 16 tokens. A piece of a stream holds what was sampled in
about 20 ms, and an update ends the piece that is being made. Measured: gaps between pieces elsewhere, the longest gap
of any stream across each update, the time for which steps stood still (`update_s`), a decode step (`busy_s` over steps)
and the copy alone (`CausalModel.load_state` with nothing beside it). Bounds: standing still costs at most a step and
the copy; a gap across an update is at most one elsewhere and those. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from common.figures import read_options
from engine import MODELS

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import Delta, GenerateRequest, Sampling
from sparring.model.attention import Packed
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.head import score_tokens
from sparring.model.load import load
from sparring.types import WeightRef
from sparring.weights.inline import publish

PROBE = tuple(range(5, 21))
PROMPT = 64


def references(folder: str, count: int) -> tuple[list[WeightRef], list[float]]:
    """Versions 1 to `count`, of weights that differ a little, with their probes; seconds to copy such weights into a
    model."""
    model, refs, copies = load(folder), [], []
    row, targets = torch.tensor(PROBE[:-1]), torch.tensor(PROBE[1:])
    with torch.inference_mode():
        states = [{name: t.clone() * (1.0 + 0.01 * i) for name, t in model.state().items()} for i in range(2)]
        for version in range(1, count + 1):
            started = time.perf_counter()
            model.load_state(states[version % 2])
            copies.append(time.perf_counter() - started)
            hidden = model.hidden(row, torch.arange(len(row)), Packed.of([len(row)]))
            probe = score_tokens(model, hidden, targets, torch.ones(len(row)), 0).logprob.tolist()
            # versions of equal weights share their copies
            refs.append(publish("policy", version, states[version % 2], (PROBE, tuple(probe))))
    return refs, copies


async def follow(engine: NativeEngine, number: int, arrivals: list[float], seen: list[int]) -> None:
    """Note when every piece of a stream comes; one request behind the other until all updates are through."""
    while seen[number] >= 0:
        tokens = tuple((number * 7 + 3 * i) % 4096 for i in range(PROMPT))
        sampling = Sampling(max_tokens=1900, seed=number)
        async for piece in engine.stream(GenerateRequest(id=str(number), tokens=tokens, sampling=sampling)):
            if seen[number] < 0:
                return
            if isinstance(piece, Delta):
                arrivals.append(time.perf_counter())
                seen[number] += len(piece.tokens)


async def measure(engine: NativeEngine, refs: list[WeightRef], arguments: argparse.Namespace) -> dict[str, Any]:
    """Gaps across updates and elsewhere."""
    seen = [0] * arguments.streams
    arrivals: list[list[float]] = [[] for _ in seen]
    streams = [asyncio.create_task(follow(engine, i, arrivals[i], seen)) for i in range(arguments.streams)]
    pulls, still = [], []
    steps_at, busy_at = engine.metrics.get("steps", 0.0), engine.metrics.get("busy_s", 0.0)
    for number, ref in enumerate(refs):
        while min(seen) < (number + 1) * arguments.every:
            await asyncio.sleep(0.005)
        started, stood = time.perf_counter(), engine.metrics.get("update_s", 0.0)
        await engine.pull(ref)
        pulls.append((started, time.perf_counter()))
        still.append(engine.metrics["update_s"] - stood)
    done = max(seen) + arguments.every
    while max(seen) < done:
        await asyncio.sleep(0.005)
    metrics = engine.metrics
    seen[:] = [-1] * len(seen)
    await asyncio.gather(*streams)
    elsewhere, across = [], [0.0] * len(pulls)
    for times in arrivals:
        for before, after in itertools.pairwise(times):
            held = [i for i, (begin, end) in enumerate(pulls) if before < end and after > begin]
            for i in held:
                across[i] = max(across[i], after - before)
            elsewhere += [] if held else [after - before]
    return {
        "step_s": (metrics["busy_s"] - busy_at) / (metrics["steps"] - steps_at),
        "still_s": statistics.median(still),
        "longest_still_s": metrics["max_update_stall_s"],
        "pull_s": statistics.median(end - begin for begin, end in pulls),
        "gap_elsewhere_s": statistics.median(elsewhere),
        "longest_gap_elsewhere_s": max(elsewhere),
        "gaps_across_s": across,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--every", type=int, default=60, help="tokens of each stream between two updates")
    parser.add_argument("--threads", type=int, default=2)
    arguments = read_options(parser, streams=2, updates=2, every=4)
    torch.set_num_threads(arguments.threads)
    shape, spec = MODELS["A"]
    with tempfile.TemporaryDirectory() as folder:
        create(InitConfig(**shape), spec["vocabulary"], folder, 0)
        refs, copies = references(folder, arguments.updates)
        engine = NativeEngine(load(folder), EngineConfig(), threads=arguments.threads)

        async def run() -> dict[str, Any]:
            figures = await measure(engine, refs, arguments)
            await engine.close()
            return figures

        figures = {**asyncio.run(run()), "copy_s": statistics.median(copies)}
    gap = statistics.median(figures["gaps_across_s"])
    for name in (
        "step_s",
        "copy_s",
        "still_s",
        "longest_still_s",
        "pull_s",
        "gap_elsewhere_s",
        "longest_gap_elsewhere_s",
    ):
        print(f"{name:24} {1e3 * figures[name]:8.2f} ms")
    print(f"{'gap across an update':24} {1e3 * gap:8.2f} ms, longest {1e3 * max(figures['gaps_across_s']):.2f} ms")
    room = figures["step_s"] + figures["copy_s"]
    found = {
        "steps stand still for an update, over a decode step and the copy": figures["still_s"] / room,
        "longest gap of a stream across an update, over one elsewhere, a step and the copy": gap
        / (figures["gap_elsewhere_s"] + room),
    }
    rest = {"unit": "x", "target": 1.0, "direction": "<="}
    claims = [{"name": f"{name}, median of updates", "value": round(value, 3), **rest} for name, value in found.items()]
    print(json.dumps({"benchmark": "live_update", **figures, "claims": claims}))


if __name__ == "__main__":
    main()
