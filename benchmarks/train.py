"""Forward and backward of training: tokens per second against TRL and a plain loop, common beginnings, memory of the
loss.

    python benchmarks/train.py --setup                     # once: TRL into its own virtual environment, .venv-trl
    python benchmarks/train.py [--parts peers,prefixes,memory] [--threads 2] [--steps 9] [--warmup 2] [--peer-rows 8]

`peers`: supervised fine-tuning of model A in float32 on 32 rows at once, of log-normal lengths (median 148, mean 190,
at most 1,024 tokens), every token but the first trained. Ours is the trainer of a run (packing, tensors, gradients);
TRL's `SFTTrainer` and a plain loop over `transformers` pad `--peer-rows` rows at a time, without gradient
checkpointing. All get the same model files, rows and threads and must find the same loss. Each is a process of its own;
they take turns batch by batch.

`prefixes`: the trainer on rows that begin alike over rows that are the same but for their first token, and so share
nothing (continuations of one prefix: model A, at a token budget that holds them; groups: the quickstart's model); and
rows that share nothing over the same computation without a tree, on one thread. In turns; ratios are medians of each
turn's.

`memory`: what one loss of 8,192 tokens of width 256 takes beyond its inputs, the head's weight and that weight's
gradient (float32 while it is added up), at three vocabularies: growth of the resident set from just before the loss to
its peak, less that gradient. A process for each, in which every large tensor is mapped and unmapped by itself.

On a machine that does other work, look at processor seconds (`cpu`): what threads that wait do not spend.

The last line is one JSON object with `claims`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.figures import ROOT, claim, read_options
from peers.sides import Side, environment, install
from rl_step import MODEL_A, PEER_VENV, PEERS

ROWS, BUDGET, LONGEST = 32, 8192, 1024
FASTER = 2.0
LARGE_BUDGET = 32768
PREFIX, CONTINUATIONS, AFTER = 1000, 16, {128: 3.5, 1000: 1.5}
NOTHING_SHARED = 0.95
HEADER, PROMPT, REPLY = 120, 45, ((1.0, 20), (0.0, 12), (1.0, 18))
QUICKSTART = {"policy": (16, 8, 2.5), "imitate": (24, 1, 1.3)}
VOCABULARIES, LOSS_TOKENS = (4096, 32768, 151936), 8192
MEMORY_RATIO = 1.25


def sample(index: int, tokens: Sequence[int], marks: Sequence[float], term: str = "imitate") -> Any:
    """A row that trains the tokens with a mark."""
    from sparring.types import Sample

    row = Sample(id=str(index), group="0", source="policy", tokens=tuple(tokens), weights={term: tuple(marks)})
    if term != "policy":
        return row
    advantage, versions = random.Random(index).uniform(0.1, 1.0), tuple(0 if mark else -1 for mark in marks)
    logprobs, advantages = tuple(-6.4 * mark for mark in marks), tuple(advantage * mark for mark in marks)
    return replace(row, advantages=advantages, logprobs=logprobs, versions=versions, kv_versions=versions)


def _all_trained(index: int, tokens: Sequence[int]) -> Any:
    return sample(index, tokens, (0.0, *(1.0 for _ in tokens[1:])))


def batch_of(rows: Sequence[Any]) -> Any:
    """One update."""
    from sparring.batch.denominators import denominators
    from sparring.types import Batch

    return Batch(step=1, model="policy", rows=tuple(rows), denominators=denominators(rows))


def trainer_of(model: str | Path, *, threads: int, budget: int = BUDGET) -> Any:
    """A trainer whose steps hardly move the weights."""
    from sparring.algo.config import AlgoConfig
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.loss.policy import PolicyLoss
    from sparring.model.load import load
    from sparring.protocols import Loss
    from sparring.train.config import TrainConfig
    from sparring.train.trainer import LocalTrainer

    config = TrainConfig(token_budget=budget, learning_rate=1e-30)
    losses: list[Loss] = [PolicyLoss(AlgoConfig()), ImitateLoss()]
    return LocalTrainer(load(model), config, losses, name="policy", total_steps=1000, threads=threads)


# Against others.


def prepare(spec: dict[str, Any]) -> dict[str, Any]:
    """Write model and tokenizer into spec["folder"] and fill in `model` and `batches`."""
    from sparring.model.config import InitConfig
    from sparring.model.create import create
    from sparring.render.train_tokenizer import train_tokenizer

    init, model = InitConfig(**{**MODEL_A, "max_positions": 2 * LONGEST}), f"{spec['folder']}/model"
    train_tokenizer(["user assistant system"], init.vocab_size, model)
    create(init, init.vocab_size, model, 0)
    draw = random.Random(0)

    def row() -> list[int]:
        length = min(LONGEST, max(16, round(math.exp(draw.gauss(5.0, 0.7)))))
        return [draw.randrange(init.vocab_size) for _ in range(length)]

    batches = [[row() for _ in range(ROWS)] for _ in range(spec["warmup"] + spec["steps"])]
    return {**spec, "model": model, "batches": batches}


async def take_turns(spec: Mapping[str, Any]) -> None:
    """Our side: the gradients of one batch for each line on standard input."""
    trainer = trainer_of(spec["model"], threads=spec["threads"])
    for rows in spec["batches"]:
        batch = batch_of([_all_trained(i, row) for i, row in enumerate(rows)])
        sys.stdin.readline()
        wall, cpu = time.perf_counter(), time.process_time()
        found = await trainer.forward_backward(batch)
        seconds = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        step = (await trainer.step()).metrics["step_s"]
        told = {name: found[name] for name in ("micro_batches", "tokens_forward")}
        print(json.dumps({**seconds, "loss": found["loss_imitate"], "optimiser_s": step, **told}), flush=True)
    await trainer.close()


def against_peers(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Figures and claims."""
    path = Path(spec["folder"]) / "spec.json"
    path.write_text(json.dumps(spec))
    peer, variables = [PEER_VENV / "bin" / "python", PEERS / "sft_step.py"], environment(spec["threads"])
    sides = {
        "ours": Side([sys.executable, __file__, "--role", "ours", "--spec", path], variables),
        "trl": Side([*peer, "trl", path], variables),
        "loop": Side([*peer, "loop", path], variables),
    }
    turns = [{name: side.turn() for name, side in sides.items()} for _ in spec["batches"]]
    for side in sides.values():
        side.close()
    for turn in turns:
        for name, found in turn.items():
            assert math.isclose(found["loss"], turn["ours"]["loss"], rel_tol=1e-4), (name, turn)
    measured = list(zip(spec["batches"], turns, strict=True))[spec["warmup"] :]
    sizes = [sum(map(len, batch)) for batch, _ in measured]
    figures: dict[str, Any] = {"tokens": sum(sizes) / len(sizes)}
    claims: list[tuple[Any, ...]] = []
    for name in sides:
        rates = [size / turn[name]["seconds"] for size, (_, turn) in zip(sizes, measured, strict=True)]
        rest = {key: statistics.median(turn[name][key] for _, turn in measured) for key in measured[0][1][name]}
        figures[name] = {"tokens_per_second": statistics.median(rates), **rest}
        if name == "ours":
            continue
        for key in ("seconds", "cpu_s"):
            ratios = [turn[name][key] / turn["ours"][key] for _, turn in measured]
            figures[name][f"over_ours_{key}"] = statistics.median(ratios)
            figures[name][f"over_ours_{key}_by_batch"] = [round(ratio, 2) for ratio in ratios]
        claims.append((f"tokens/s of ours over {name}", figures[name]["over_ours_seconds"], "x", FASTER, ">="))
    return figures, claims


# Common beginnings.


def in_turns(less: Callable[[], object], more: Callable[[], object], rounds: int) -> dict[str, float]:
    """Medians, after one round that does not count: wall-clock and processor seconds of `less`, and `more` over
    `less`."""
    found: list[tuple[float, ...]] = []
    for _ in range(rounds + 1):
        times: list[float] = []
        for call in (less, more):
            begin = time.perf_counter(), time.process_time()
            call()
            times += [time.perf_counter() - begin[0], time.process_time() - begin[1]]
        found.append((times[0], times[1], times[2] / times[0], times[3] / times[1]))
    names = ("seconds", "cpu_s", "ratio", "cpu_ratio")
    return dict(zip(names, map(statistics.median, zip(*found[1:], strict=True)), strict=True))


def apart(rows: Sequence[Any]) -> list[Any]:
    """The same, each with a first token of its own."""
    return [replace(row, tokens=(index, *row.tokens[1:])) for index, row in enumerate(rows)]


def continuations(after: int, vocabulary: int, part: int = 1) -> list[Any]:
    """16 rows that go on differently after one prefix, all that follows trained; `part` divides the prefix and them."""
    after //= part
    draw = random.Random(0)
    prefix = [draw.randrange(vocabulary) for _ in range(PREFIX // part)]
    marks = (*(0.0 for _ in prefix), *(1.0 for _ in range(after)))
    return [sample(i, prefix + [draw.randrange(vocabulary) for _ in range(after)], marks) for i in range(CONTINUATIONS)]


def groups_under_a_header(groups: int, size: int, term: str, vocabulary: int) -> list[Any]:
    """Prompts under one header with `size` rows each, as the quickstart's."""
    draw = random.Random(0)
    header = [draw.randrange(vocabulary) for _ in range(HEADER)]
    marks = (*(0.0 for _ in range(HEADER + PROMPT)), *(mark for mark, length in REPLY for _ in range(length)))
    prompts = [header + [draw.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(groups)]
    every, rest = [prompt for prompt in prompts for _ in range(size)], len(marks) - HEADER - PROMPT
    return [
        sample(i, prompt + [draw.randrange(vocabulary) for _ in range(rest)], marks, term)
        for i, prompt in enumerate(every)
    ]


def in_a_line(trainer: Any, batch: Any) -> Callable[[], object]:
    """The gradients of the very micro-batches that `trainer` makes of a batch in which nothing is shared, one after the
    other, by flat rows end to end."""
    import torch

    from sparring.batch.units import cut_units, pack_units
    from sparring.model.attention import Packed
    from sparring.model.head import token_quantities

    model, parameters, lanes = trainer._model, trainer._optimiser.parameters, trainer._weights.parts.lanes
    packed = pack_units(batch.rows, BUDGET, frozenset())
    parts = [part for rows in packed for part in cut_units(rows, lanes, frozenset(), model.context)]

    def work() -> None:
        for part in parts:
            tokens = torch.tensor([token for row in part for token in row.tokens[:-1]])
            positions = torch.cat([torch.arange(len(row.tokens) - 1) for row in part])
            lengths = torch.tensor([0, *(len(row.tokens) - 1 for row in part)], dtype=torch.int32)
            marks = torch.tensor([mark for row in part for mark in row.weights["imitate"][1:]])
            chosen = marks.nonzero()[:, 0]
            targets = torch.tensor([token for row in part for token in row.tokens[1:]])[chosen]
            where = Packed(lengths.cumsum(0, dtype=torch.int32))
            hidden = model.hidden(tokens, positions, where, chosen)
            found = token_quantities(model, hidden, targets, torch.ones(len(targets)), {"logprob"})["logprob"]
            trainer._optimiser.add(torch.autograd.grad(-(marks[chosen] * found).sum(), parameters, allow_unused=True))
        trainer._optimiser.discard()

    return lambda: trainer._worker.submit(work).result()


def common_beginnings(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Figures and claims."""
    figures: dict[str, Any] = {}
    claims: list[tuple[Any, ...]] = []
    vocabulary = MODEL_A["vocab_size"]
    for after, target in AFTER.items():
        trainer = trainer_of(spec["model"], threads=spec["threads"], budget=LARGE_BUDGET)
        name = f"{CONTINUATIONS} x {after} after {PREFIX}"
        figures[name] = shared_over_apart(trainer, continuations(after, vocabulary, spec["part"]), spec["rounds"])
        claims.append((f"rows apart over shared: {name}", figures[name]["ratio"], "x", target, ">="))
    trainer = trainer_of(quickstart_model(spec["folder"]), threads=spec["threads"])
    for term, (count, size, target) in QUICKSTART.items():
        groups = max(2, count // spec["part"])
        name = f"{groups} x {size} under a header, {term}"
        figures[name] = shared_over_apart(trainer, groups_under_a_header(groups, size, term, 640), spec["rounds"])
        claims.append((f"rows apart over shared: {name}", figures[name]["ratio"], "x", target, ">="))
    trainer, varied = (
        trainer_of(spec["model"], threads=1),
        [_all_trained(i, row) for i, row in enumerate(spec["batches"][0])],
    )
    for name, rows in {
        "16 x 1128": apart(continuations(128, vocabulary, spec["part"])),
        "varied lengths": varied,
    }.items():
        batch = batch_of(rows)
        figures[f"nothing shared, {name}"] = in_turns(ours(trainer, batch), in_a_line(trainer, batch), spec["rounds"])
        ratio = figures[f"nothing shared, {name}"]["ratio"]
        claims.append((f"nothing shared, {name}: without a tree over with one", ratio, "x", NOTHING_SHARED, ">="))
    return figures, claims


def shared_over_apart(trainer: Any, rows: Sequence[Any], rounds: int) -> dict[str, float]:
    """Rows that share over the same rows apart, and how many tokens are computed of each."""
    calls = [ours(trainer, batch_of(made)) for made in (rows, apart(rows))]
    counts = dict(zip(("tokens", "tokens_apart"), (call() for call in calls), strict=True))
    return {**in_turns(calls[0], calls[1], rounds), **counts}


def ours(trainer: Any, batch: Any) -> Callable[[], float]:
    """The trainer's gradients of a batch, on its own thread; gives how many tokens it computed."""

    def work() -> float:
        found = trainer._forward_backward(batch)
        trainer._optimiser.discard()
        return float(found["tokens_forward"])

    return lambda: trainer._worker.submit(work).result()


def quickstart_model(folder: str) -> Path:
    """A model of the quickstart's size."""
    from sparring.model.create import create
    from sparring.recipe.load import load as load_recipe

    size = load_recipe(ROOT / "recipes" / "quickstart.toml").models["policy"].init
    assert size is not None
    return create(size, 640, Path(folder) / "quickstart", 7)


# Memory of the loss.


def resident_bytes(which: str) -> int:
    """`VmRSS`, what is resident, or `VmHWM`, the most since the mark was last taken back."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def loss_memory(vocabulary: int, folder: str, dtype: str, tokens: int) -> None:
    """Print by how much one loss raises the peak, beyond the gradient of the head's weight."""
    import torch

    from sparring.model.config import InitConfig
    from sparring.model.create import create
    from sparring.model.head import token_quantities
    from sparring.model.load import load

    size = {**MODEL_A, "num_layers": 1, "vocab_size": vocabulary}
    model = load(create(InitConfig(**size), vocabulary, f"{folder}/{vocabulary}", 0), dtype=dtype)
    head: Any = model.head
    weight: torch.Tensor = head.weight
    hidden = torch.randn(tokens, MODEL_A["hidden_size"]).to(model.dtype).requires_grad_()
    targets, heat = torch.randint(vocabulary, (tokens,)), torch.ones(tokens)
    found: dict[str, float] = {}
    for rows in (slice(32), slice(None)):  # the first makes what stays
        Path("/proc/self/clear_refs").write_text("5")
        before, begin = resident_bytes("VmRSS"), time.perf_counter()
        loss = token_quantities(model, hidden[rows], targets[rows], heat[rows], {"logprob"})["logprob"].sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        found = {"seconds": time.perf_counter() - begin, "peak_bytes": resident_bytes("VmHWM") - before}
        found["beyond_bytes"] = found["peak_bytes"] - 4 * weight.numel()
        del loss, gradients
    print(json.dumps({"vocabulary": vocabulary, "logits_bytes": 4 * tokens * vocabulary, **found}), flush=True)


def memory(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Figures and claims."""
    figures, claims = {}, []
    for dtype in ("float32", "bfloat16"):
        found = []
        for vocabulary in VOCABULARIES:
            role = [
                "--role",
                f"memory-{dtype}",
                "--vocabulary",
                vocabulary,
                "--tokens",
                LOSS_TOKENS // spec["part"],
                "--spec",
                spec["folder"],
            ]
            command = [sys.executable, __file__, *role]
            variables = {**environment(spec["threads"]), "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
            done = subprocess.run([*map(str, command)], env=variables, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        figures[dtype] = found
        ratio = found[-1]["beyond_bytes"] / found[0]["beyond_bytes"]
        claims.append((f"memory of the loss, {dtype}: vocabulary 151936 over 4096", ratio, "x", MEMORY_RATIO, "<="))
    return figures, claims


PARTS = {"peers": against_peers, "prefixes": common_beginnings, "memory": memory}


def main() -> None:
    """Measure and print; or do what one `--role` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install the peer and stop")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=9, help="of peers")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="of prefixes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-rows", type=int, default=8, help="rows that a peer pads together; divides 32")
    parser.add_argument("--role", help="one process of the measurement")
    parser.add_argument("--vocabulary", type=int, help="with --role")
    parser.add_argument("--tokens", type=int, help="with --role")
    parser.add_argument("--spec", type=Path, help="with --role")
    arguments = read_options(parser, parts="prefixes,memory", steps=1, warmup=0, rounds=1)
    if arguments.role == "ours":
        asyncio.run(take_turns(json.loads(arguments.spec.read_text())))
        return
    if arguments.role:
        dtype = arguments.role.removeprefix("memory-")
        loss_memory(arguments.vocabulary, arguments.spec, dtype, arguments.tokens)
        return
    parts = arguments.parts.split(",")
    if arguments.setup or "peers" in parts:
        install(PEER_VENV, PEERS / "trl.txt")
    if arguments.setup:
        return
    load_before, figures, claims = os.getloadavg()[0], {}, []
    with tempfile.TemporaryDirectory() as folder:
        spec = {name: getattr(arguments, name) for name in ("steps", "warmup", "rounds", "threads", "peer_rows")}
        spec = prepare({**spec, "folder": folder, "rows": ROWS, "part": 16 if arguments.short else 1})
        for part in parts:
            figures[part], made = PARTS[part](spec)
            print(part, json.dumps(figures[part], indent=2), flush=True)
            claims += made
    told = [claim(*of) for of in claims]
    print(json.dumps({"benchmark": "train", "threads": arguments.threads, "load_before": load_before, "claims": told}))


if __name__ == "__main__":
    main()
