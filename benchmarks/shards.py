"""What a step costs a rank whose parameters are in shards, beside PyTorch's FSDP2.

    python benchmarks/shards.py [--ranks 2] [--steps 3] [--tokens 8192]

Model A in float32, rows of 256 tokens, parts of 1,024 tokens, one thread each: processor seconds of a step (forward,
backward, exchange, clipping, AdamW) of the busiest rank of `[cluster] shard = "parameters"`, over those of FSDP2 with
its own reduce-scatter around the same layers, with the same kernels and losses. They take turns step by step.

The last line is one JSON object with `claims`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common.figures import claim, processor_s, read_options
from ranks import BUDGET, batch
from rl_step import MODEL_A
from torch import nn

from sparring.algo.config import AlgoConfig
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.tensors import micro_batch
from sparring.batch.units import cut_units, pack_units
from sparring.cluster.rank_process import RankProcess
from sparring.cluster.ranks import RankTrainer
from sparring.cluster.trainer import TrainerParts
from sparring.model.attention import Packed
from sparring.model.config import InitConfig, ModelConfig
from sparring.model.create import create
from sparring.model.decoder import add_and_norm
from sparring.model.head import token_quantities
from sparring.model.load import load
from sparring.protocols import TrainPlan
from sparring.train.config import TrainConfig
from sparring.train.parts import LANES

TARGET = 1.15


class Shell(nn.Module):
    """Lean layer that torch's hooks see; it packs what FSDP2 has gathered."""

    def __init__(self, layer: Any, module: nn.Module) -> None:
        super().__init__()
        self.module, self._layer = module, (layer,)

    def forward(self, *arguments: Any) -> Any:
        """Compute a layer."""
        for product in self._layer[0].products:
            product.refresh()
        return self._layer[0](*arguments)


class Whole(nn.Module):
    """Model whose layers are shells; embedding, norm and head belong to itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        body = model.module.base_model
        self.embedding, self.norm, self._model = body.embed_tokens, body.norm, (model,)
        self.head = model.module.get_output_embeddings()
        self.shells = nn.ModuleList(map(Shell, model.decoder.layers, body.layers))

    def forward(self, micro: Any, loss: PolicyLoss) -> torch.Tensor:
        """Compute the loss of a part."""
        model = self._model[0]
        self.head.product.refresh()
        angles = model.decoder.rotary.rows(micro.positions)
        x, y = nn.functional.embedding(micro.tokens, self.embedding.weight), None
        for shell in self.shells:
            rows = micro.predicting if shell is self.shells[-1] else None
            x, y = shell(x, y, angles, Packed(micro.cu_seqlens, micro.shared), rows)
        hidden = add_and_norm(x, y, self.norm)[1]
        found = token_quantities(model, hidden, micro.targets, micro.temperature, loss.needs.quantities | {"logprob"})
        return loss(found, micro).loss


def fsdp(rank: int, count: int, folder: Path, tokens: int, calls: Connection) -> None:
    """Answer each step's number with "done", as one rank of FSDP2."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder / 'fsdp'}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    model = load(folder / "model")
    whole, config = Whole(model), TrainConfig(token_budget=BUDGET)
    for shell in whole.shells:
        fully_shard(shell, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo refuses the other kind
    matrices = [p for p in whole.parameters() if p.ndim > 1]
    others = [p for p in whole.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw, loss = torch.optim.AdamW(groups, lr=config.learning_rate), PolicyLoss(AlgoConfig())
    calls.send("ready")
    while True:
        try:
            step = calls.recv()
        except EOFError:
            return
        given = batch(step, tokens, model.vocab_size)
        packed = pack_units(list(given.rows), BUDGET, frozenset())
        parts = [part for rows in packed for part in cut_units(rows, LANES, frozenset(), model.context)]
        for rows in parts[rank::count]:
            whole(micro_batch(rows, given.denominators, model.device), loss).backward()
        if config.gradient_clip:
            nn.utils.clip_grad_norm_(whole.parameters(), config.gradient_clip)
        adamw.step()
        adamw.zero_grad()
        calls.send("done")


async def measured(folder: Path, ranks: int, steps: int, tokens: int) -> list[tuple[float, float]]:
    """Processor seconds of each step of the busiest rank: ours, and FSDP2's."""
    init = InitConfig(**MODEL_A)
    create(init, init.vocab_size, folder / "model", 0)
    parts = TrainerParts(
        name="policy",
        path=str(folder / "model"),
        plan=TrainPlan(losses=[PolicyLoss(AlgoConfig())], total_steps=steps + 1, overrides={}),
        models={"policy": ModelConfig(path=str(folder / "model"), dtype="float32")},
        train=TrainConfig(token_budget=BUDGET),
        device="cpu",
        threads=1,
        sharded=True,
    )
    spawned, theirs = multiprocessing.get_context("spawn"), list[tuple[Any, Connection]]()
    for rank in range(ranks):
        here, there = spawned.Pipe()
        process = spawned.Process(target=fsdp, args=(rank, ranks, folder, tokens, there), daemon=True)
        process.start()
        theirs.append((process, here))
    assert [calls.recv() for _, calls in theirs] == ["ready"] * ranks
    processes = [RankProcess(rank) for rank in range(ranks)]
    ours, found = RankTrainer(parts, lambda _: processes, ranks, 300.0), []
    try:
        for step in range(steps + 1):
            given = batch(step, tokens, init.vocab_size)
            at = [processor_s(process.pid) for process in processes]
            await ours.forward_backward(given)
            await ours.step()
            own = max(processor_s(process.pid) - s for process, s in zip(processes, at, strict=True))
            at = [processor_s(process.pid) for process, _ in theirs]
            for _, calls in theirs:
                calls.send(step)
            assert [calls.recv() for _, calls in theirs] == ["done"] * ranks
            other = max(processor_s(process.pid) - s for (process, _), s in zip(theirs, at, strict=True))
            found.append((own, other))
            print(f"a rank {own:.2f} s, one of FSDP2 {other:.2f} s", flush=True)
    finally:
        await ours.close()
        for process, calls in theirs:
            calls.close()  # which ends it
            process.join(10.0)
            process.kill()
    return found[1:]  # the first step loads


def main() -> None:
    """Measure, print, claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8_192)
    options = read_options(parser, steps=1, tokens=1024)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measured(Path(folder), options.ranks, options.steps, options.tokens))
    ratio = statistics.median(own / other for own, other in figures)
    name = f"a step of one of {options.ranks} ranks with parameters in shards over FSDP2's, processor time"
    print(f"{time.perf_counter() - began:.0f} s")
    print(json.dumps({"claims": [claim(name, ratio, "", TARGET, "<=")]}))


if __name__ == "__main__":
    main()
