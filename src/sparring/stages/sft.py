"""Supervised fine-tuning on demonstrations: packed rows, loss on assistant tokens only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from sparring.batch.demonstration import demonstration, demonstration_batch
from sparring.errors import refusal
from sparring.loop import run_loop
from sparring.protocols import TrainPlan
from sparring.stages.checkpoints import Checkpoints
from sparring.stages.context import POLICY, Context
from sparring.stages.demonstrate import demonstrations
from sparring.stages.lora import trained_folder
from sparring.types import Batch, Sample, StepResult


class _OpenWindow:
    """Demonstrations wait for nobody."""

    def release(self, step: int) -> None:
        """Nothing waits."""


async def run(context: Context) -> dict[str, Any]:
    """Fine-tune the stage's input on demonstrations and write a Hugging Face folder, or an adapter's.

    Returns:
        `rows` (distinct demonstrations), `tokens_trained`, `loss` of the last step and `model`, the folder.
    """
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.stages.export import write_model

    config = context.config.sft
    source = trained_folder(context, context.input("sft"))
    rows = [
        demonstration(rendered.tokens, rendered.sampled, name)
        for name, rendered in await demonstrations(context, context.renderer(source))
    ]
    if not rows:
        raise refusal("sft", "at least one demonstration", "none", "add rows to [sft] data, or demonstrations to the environment")
    context.sink.start("sft", config.steps)
    plan = TrainPlan(losses=[ImitateLoss()], total_steps=config.steps, overrides=config.train)
    trainer = context.cluster.trainer(POLICY, path=str(source), plan=plan)
    checkpoints = Checkpoints(
        trainer=trainer,
        store=context.store,
        stage="sft",
        folder=context.folder / "sft",
        config=msgspec.structs.replace(context.config.train, **config.train),
        last_step=config.steps,
    )
    done, state = await checkpoints.resume()
    context.store.truncate("sft", done)
    totals = {"tokens_trained": 0, "loss": 0.0, **state}

    async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
        totals["tokens_trained"] += int(metrics["tokens_trained"])
        totals["loss"] = metrics["loss_imitate"]
        context.store.metric("sft", step.version, metrics)
        context.sink.log("sft", step.version, metrics)
        await checkpoints.after(step, metrics, totals)

    batches = _batches(rows, range(done + 1, config.steps + 1), config.rows_per_step, context.config.run.seed)
    await run_loop(batches, {POLICY: trainer}, {}, _OpenWindow(), after_step)
    await write_model(trainer, source, context.output("sft"))
    return {"rows": len(rows), "model": str(context.output("sft")), **totals}


async def _batches(
    rows: Sequence[Sample], steps: range, rows_per_step: int, seed: int
) -> AsyncIterator[Batch]:
    """One batch per step. Every row is seen once per epoch, in an order that depends on (seed, epoch) alone, so a resume
    needs no more than the number of steps that are done."""
    orders: dict[int, list[int]] = {}
    for step in steps:
        places = range((step - 1) * rows_per_step, step * rows_per_step)
        for epoch in {place // len(rows) for place in places} - orders.keys():
            orders[epoch] = _order(len(rows), seed, epoch)
        chosen = [rows[orders[place // len(rows)][place % len(rows)]] for place in places]
        yield demonstration_batch(chosen, step=step, model=POLICY)


def _order(count: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(count), key=lambda row: xxhash.xxh3_64_intdigest(f"sft/{seed}/{epoch}/{row}".encode()))
