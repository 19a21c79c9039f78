"""What a step costs a trainer's rank.

    python benchmarks/ranks.py [--ranks 2] [--steps 5] [--tokens 16384]

Model A in float32, rows of 256 tokens, parts of 1,024 tokens, one thread each: processor seconds of a step (forward,
backward, exchange, AdamW, gathering) of the busiest rank, over those of the trainer in this process. They take turns
step by step, and both must end with the same weights.

The last line is one JSON object with `claims`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from common.figures import claim, processor_s, read_options
from rl_step import MODEL_A

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.cluster.rank_process import RankProcess
from sparring.cluster.ranks import RankTrainer
from sparring.cluster.trainer import TrainerParts
from sparring.model.config import InitConfig, ModelConfig
from sparring.model.create import create
from sparring.protocols import TrainPlan
from sparring.train.config import TrainConfig
from sparring.types import Batch, Sample

ROW, BUDGET = 256, 2048
TARGET = 0.56


def batch(step: int, tokens: int, vocabulary: int) -> Batch:
    """A step of rows that share nothing."""
    draw, sampled = random.Random(step), (0.0, *(1.0,) * (ROW - 1))
    rows = tuple(
        Sample(
            id=f"{step}-{number}",
            group="g",
            source="policy",
            tokens=tuple(draw.randrange(vocabulary) for _ in range(ROW)),
            weights={"policy": sampled},
            logprobs=(-8.0,) * ROW,
            advantages=(draw.uniform(-1.0, 1.0),) * ROW,
            versions=(0,) * ROW,
            kv_versions=(0,) * ROW,
        )
        for number in range(tokens // ROW)
    )
    return Batch(step=step, model="policy", rows=rows, denominators={"policy": float(len(rows) * (ROW - 1))})


async def measured(folder: Path, ranks: int, steps: int, tokens: int) -> list[tuple[float, float]]:
    """Processor seconds of each step: of the trainer in this process, and of the busiest rank."""
    init = InitConfig(**MODEL_A)
    create(init, init.vocab_size, folder, 0)
    parts = TrainerParts(
        name="policy",
        path=str(folder),
        plan=TrainPlan(losses=[PolicyLoss(AlgoConfig())], total_steps=steps + 1, overrides={}),
        models={"policy": ModelConfig(path=str(folder), dtype="float32")},
        train=TrainConfig(token_budget=BUDGET),
        device="cpu",
        threads=1,
    )
    processes = [RankProcess(rank) for rank in range(ranks)]
    alone, together, found = parts.trainer(), RankTrainer(parts, lambda _: processes, ranks, 300.0), []
    try:
        for step in range(steps + 1):
            given = batch(step, tokens, init.vocab_size)
            before = time.process_time()
            await alone.forward_backward(given)
            await alone.step()
            own = time.process_time() - before
            at = [processor_s(process.pid) for process in processes]
            metrics = await together.forward_backward(given)
            await together.step()
            found.append((own, max(processor_s(p.pid) - s for p, s in zip(processes, at, strict=True))))
            print(f"{metrics['micro_batches']:.0f} parts: alone {own:.2f} s, a rank {found[-1][1]:.2f} s", flush=True)
        assert (await alone.push()).checksum == (await together.push()).checksum
    finally:
        await together.close()
        await alone.close()
    return found[1:]  # the first step loads


def main() -> None:
    """Measure, print, claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16_384)
    options = read_options(parser, steps=1, tokens=1024)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measured(Path(folder) / "model", options.ranks, options.steps, options.tokens))
    ratio = statistics.median(rank / own for own, rank in figures)
    name = f"a step of one of {options.ranks} ranks over one process, processor time"
    print(json.dumps({"claims": [claim(name, ratio, "", TARGET, "<=")]}))


if __name__ == "__main__":
    main()
