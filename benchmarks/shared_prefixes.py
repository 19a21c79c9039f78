"""What computing every common beginning once is worth: a trainer's step on rows that share prefixes, and on rows as long that do not.

The size is the quickstart's: 16 groups of 8 rollouts, and 24 demonstrations, of 215 tokens, under one header of 120. The
rows that share nothing are the same but for their first token. The last line is one JSON object with `claims`.

Usage: python benchmarks/shared_prefixes.py [--threads 2] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.imitate import ImitateLoss
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.denominators import denominators
from sparring.config import load as load_recipe
from sparring.model.create import create
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
VOCABULARY = 640
HEADER, PROMPT, REPLY = 120, 45, ((1.0, 20), (0.0, 12), (1.0, 18))


def make_batch(groups: int, size: int, term: str, *, shared: bool) -> Batch:
    """`groups` prompts under one header with `size` rows each; `shared` false gives every row a first token of its own."""
    draw = random.Random(0)
    header = [draw.randrange(VOCABULARY) for _ in range(HEADER)]
    marks = (*(0.0 for _ in range(HEADER + PROMPT)), *(mark for mark, length in REPLY for _ in range(length)))
    rows = []
    for group in range(groups):
        prompt = header + [draw.randrange(VOCABULARY) for _ in range(PROMPT)]
        for _ in range(size):
            tokens = prompt + [draw.randrange(VOCABULARY) for _ in range(len(marks) - len(prompt))]
            advantage = draw.uniform(0.1, 1.0)
            row = Sample(id=str(len(rows)), group=str(group), source="policy", tokens=tuple(tokens), weights={term: marks})
            if term == "policy":
                row = replace(
                    row,
                    logprobs=tuple(-6.4 * mark for mark in marks),
                    advantages=tuple(advantage * mark for mark in marks),
                    versions=tuple(0 if mark else -1 for mark in marks),
                    kv_versions=tuple(0 if mark else -1 for mark in marks),
                )
            rows.append(row if shared else replace(row, tokens=(len(rows), *tokens[1:])))
    return Batch(step=1, model="policy", rows=tuple(rows), denominators=denominators(rows))


def best_seconds(calls: list[Callable[[], object]], rounds: int) -> tuple[list[float], list[float]]:
    """The least wall-clock and processor seconds of each call, measured in turns."""
    wall, processor = [float("inf")] * len(calls), [float("inf")] * len(calls)
    for _ in range(rounds + 1):
        for index, call in enumerate(calls):
            begin, spent = time.perf_counter(), time.process_time()
            call()
            wall[index] = min(wall[index], time.perf_counter() - begin)
            processor[index] = min(processor[index], time.process_time() - spent)
    return wall, processor


def main() -> None:
    """Measure, print a table, then the claims."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = load_recipe(RECIPE).models["policy"].init
    assert size is not None
    losses = [PolicyLoss(AlgoConfig()), ImitateLoss()]
    claims = []
    with tempfile.TemporaryDirectory() as folder:
        model = load(create(size, VOCABULARY, Path(folder) / "model", 7))
        trainer = LocalTrainer(model, TrainConfig(token_budget=8192), losses, name="policy", total_steps=1000)
        for name, groups, rows, term, target in (("rl", 16, 8, "policy", 2.5), ("sft", 24, 1, "imitate", 1.3)):
            steps, computed = [], []
            for shared in (True, False):
                batch = make_batch(groups, rows, term, shared=shared)
                computed.append(trainer._forward_backward(batch)["tokens_forward"])
                steps.append(lambda batch=batch: (trainer._forward_backward(batch), trainer._step()))
            (ours, apart), (ours_cpu, apart_cpu) = best_seconds(steps, arguments.rounds)
            sys.stdout.write(f"{name}, shared: {computed[0]:.0f} tokens, {ours:.3f} s, {ours_cpu:.3f} s of processor\n")
            sys.stdout.write(f"{name}, apart: {computed[1]:.0f} tokens, {apart:.3f} s, {apart_cpu:.3f} s of processor\n")
            value = round(apart_cpu / ours_cpu, 2)
            claims.append(
                {"name": f"{name}_step_processor_time", "value": value, "unit": "x", "target": target, "direction": ">="}
            )
    sys.stdout.write(json.dumps({"path": model.path_name, "threads": arguments.threads, "claims": claims}) + "\n")


if __name__ == "__main__":
    main()
