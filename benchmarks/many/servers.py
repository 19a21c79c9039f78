"""Pushes to servers, and servers beside each other, for benchmarks/scale.py."""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.figures import Claims, claim
from engine import MODELS

from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.fleet import Fleet
from sparring.generation import GenerateRequest, Sampling

REQUESTS = 64
"""Requests of each engine of a fleet."""
PUSHED: dict[str, Any] = {"hidden_size": 512, "num_layers": 12, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
"""Shape of the model whose weights are pushed: 55 million parameters."""
PUSHED_VOCABULARY = 32_768
COPIES = {"float32": 16.0, "bfloat16": 20.0}
"""Aims of a push, in copies of the weights in memory."""


@contextmanager
def served(count: int, folder: str, *words: str) -> Iterator[list[tuple[str, int]]]:
    """Start `sparring serve` several times, of one thread each; yield addresses and process ids."""
    command = [sys.executable, "-m", "sparring.cli.main", "serve", folder, "--port", "0", "--threads", "1", *words]
    with ExitStack() as stack:
        servers = []
        for _ in range(count):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            servers.append(process)
        yield [(process.stdout.readline().split()[-1], process.pid) for process in servers if process.stdout]


def push(rounds: int) -> Claims:
    """Measure a push to two engines of this machine."""
    import torch

    from sparring.model.config import InitConfig
    from sparring.model.create import create

    torch.set_num_threads(1)
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        create(InitConfig(intermediate_size=1536, **PUSHED), PUSHED_VOCABULARY, folder, 0)
        for dtype, aim in COPIES.items():
            with served(2, folder, "--dtype", dtype) as servers:
                figures = asyncio.run(pushed(folder, dtype, servers, rounds))
            copy_s = statistics.median(figures["copy"])
            for name, times in figures.items():
                median_s = statistics.median(times)
                print(f"push, {dtype}, {name}: {median_s:.3f} s, {median_s / copy_s:.1f} copies", flush=True)
            claims.append(
                claim(f"push to two engines, {dtype}", statistics.median(figures["push"]) / copy_s, "copies", aim)
            )
    return claims


async def pushed(folder: str, dtype: str, servers: list[tuple[str, int]], rounds: int) -> dict[str, list[float]]:
    """Return processor seconds of a copy of the weights, of the whole push, and of its parts by process; and its
    seconds by the clock. The first two pushes warm up."""
    import torch
    from live_update import PROBE

    from sparring.model.attention import Packed
    from sparring.model.head import score_tokens
    from sparring.model.load import load
    from sparring.weights.fetch import links
    from sparring.weights.inline import publish

    model = load(folder, dtype=dtype)
    ways = links()
    engines = [RemoteEngine(url, links=ways) for url, _ in servers]
    for engine in engines:
        engine.begin(model.state())
    whole: Fleet[RemoteEngine] = Fleet(engines)
    states = [{name: tensor.clone() * (1 + 0.01 * at) for name, tensor in model.state().items()} for at in range(2)]
    probes, kept = [], {name: tensor.clone() for name, tensor in states[0].items()}
    row, targets = torch.tensor(PROBE[:-1]), torch.tensor(PROBE[1:])
    with torch.inference_mode():
        for state in states:
            model.load_state(state)
            hidden = model.hidden(row, torch.arange(len(row)), Packed.of([len(row)]))
            probes.append(tuple(score_tokens(model, hidden, targets, torch.ones(len(row)), 0).logprob.tolist()))
    figures: dict[str, list[float]] = {name: [] for name in ("copy", "push", "run", "engines", "by the clock")}
    for version in range(1, rounds + 3):
        state, probe = states[version % 2], (PROBE, probes[version % 2])
        began = time.process_time()
        for name, tensor in state.items():
            kept[name].copy_(tensor)
        copy_s = time.process_time() - began
        before = time.process_time(), sum(threads_s(process) for _, process in servers), time.monotonic()
        await whole.pull(publish("policy", version, state, probe))
        after = time.process_time(), sum(threads_s(process) for _, process in servers), time.monotonic()
        run_s, engines_s, clock_s = (end - begin for begin, end in zip(before, after, strict=True))
        if version > 2:
            values = (copy_s, run_s + engines_s, run_s, engines_s, clock_s)
            for name, value in zip(figures, values, strict=True):
                figures[name].append(value)
    await whole.close()
    ways.close()
    return figures


def fleet(rounds: int) -> Claims:
    """Measure two engines against one."""
    from sparring.model.config import InitConfig
    from sparring.model.create import create

    shape, spec = MODELS["A"]
    with tempfile.TemporaryDirectory() as folder:
        create(InitConfig(**shape), spec["vocabulary"], folder, 0)
        with served(2, folder, "--set", f"engine.batch.max_running={REQUESTS}") as servers:
            pairs = asyncio.run(shared(servers, spec["vocabulary"], spec["new"], rounds))
    for number, (_, process) in enumerate(servers):
        alone_s, beside_s = (statistics.median(pair[at][number] for pair in pairs) for at in range(2))
        print(f"engine {number} (process {process}): alone {alone_s:.2f} s, one of two {beside_s:.2f} s", flush=True)
    ratios = [statistics.median(pair[1][number] / pair[0][number] for pair in pairs) for number in range(2)]
    return [claim(f"one of two engines with {REQUESTS} requests over one alone", max(ratios), "", 1.1)]


async def shared(
    servers: list[tuple[str, int]], vocabulary: int, new: int, rounds: int
) -> list[tuple[list[float], list[float]]]:
    """Return the processor seconds of each engine for 64 requests, alone and as one of two, of each round; the first
    warms up."""
    clients = [RemoteEngine(url) for url, _ in servers]
    alone: list[Fleet[Any]] = [Fleet([client], silent_s=1e6) for client in clients]
    both: Fleet[Any] = Fleet(clients, silent_s=1e6)
    pairs, draw = [], random.Random(0)

    def requests(count: int) -> list[GenerateRequest]:
        sampling = Sampling(max_tokens=new)
        prompts = [tuple(draw.randrange(vocabulary) for _ in range(64)) for _ in range(count)]
        return [
            GenerateRequest(id=f"{draw.random()}", tokens=prompt, sampling=replace(sampling, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]

    async def timed(engine: Fleet[Any], count: int) -> list[float]:
        before = [threads_s(process) for _, process in servers]
        await asyncio.gather(*map(engine.generate, requests(count)))
        return [threads_s(process) - begin for (_, process), begin in zip(servers, before, strict=True)]

    for number in range(rounds + 1):
        own = [(await timed(engine, REQUESTS))[at] for at, engine in enumerate(alone)]
        pair = own, await timed(both, 2 * REQUESTS)
        if number:
            pairs.append(pair)
    await both.close()
    return pairs


def threads_s(process: int) -> float:
    """Return the processor seconds of the threads of another process, to the nanosecond."""
    lists = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in lists) / 1e9
