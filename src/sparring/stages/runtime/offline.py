"""Training on rows that exist before it begins: epochs, checkpoints, metrics, resume."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import xxhash

from sparring.loop import run_loop
from sparring.protocols import Trainer
from sparring.stages.context import POLICY, Context
from sparring.stages.models.policy import train_of
from sparring.stages.models.weight_files import write_model
from sparring.stages.runtime.checkpoints import Checkpoints, Keeping
from sparring.stages.runtime.garbage import fewer_collections
from sparring.stages.runtime.reports import StepReports
from sparring.types import Batch, StepResult

T = TypeVar("T")
Contra = TypeVar("Contra", contravariant=True)


class Section(Protocol):
    """Keys that the sections of offline stages share."""

    steps: int
    rows_per_step: int
    train: dict[str, int | float | str | bool]


class BatchOf(Protocol[Contra]):
    """Function that makes batches."""

    def __call__(self, units: Sequence[Contra], /, *, step: int, model: str) -> Batch:
        """Return the batch of one optimiser step on `units`."""


class _OpenWindow:
    def release(self, step: int) -> None:
        """Do nothing: no row waits."""


async def supervise(
    context: Context,
    stage: str,
    trainer: Trainer,
    source: Path,
    units: Sequence[T],
    batch_of: BatchOf[T],
    headlines: Mapping[str, str],
) -> dict[str, Any]:
    """Train `trainer` from its last checkpoint, or from the start, to the last step of the stage; write its weights.

    Args:
        units: rows or groups of rows; an epoch has each once.
        headlines: metrics to return, by their name in the result.

    Returns:
        `model` (the folder), `tokens_trained`, the last value of each metric in `headlines`, and `best`, if there is
        one.
    """
    section: Section = getattr(context.config, stage)
    context.sink.start(stage, section.steps)
    checkpoints = Checkpoints(
        trainer=trainer,
        store=context.store,
        stage=stage,
        folder=context.folder / stage,
        keeping=Keeping.of(context.config, train_of(context.config, stage), section.steps),
        say=lambda text: context.sink.event(stage, text),
    )
    done, state = await checkpoints.resume()
    context.store.truncate(stage, done)
    totals: dict[str, Any] = {"tokens_trained": 0, **dict.fromkeys(headlines), **state}
    reports = StepReports(context.sink, stage)

    async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
        totals["tokens_trained"] += int(metrics["tokens_trained"])
        totals.update({name: metrics[metric] for name, metric in headlines.items() if metric in metrics})
        context.store.metric(stage, step.version, metrics)
        reports.log(step.version, metrics)
        await checkpoints.after(step, metrics, totals)

    async def batches(numbered: AsyncIterator[tuple[int, list[T]]]) -> AsyncIterator[Batch]:
        async for step, part in numbered:
            yield batch_of(part, step=step, model=POLICY)

    steps = range(done + 1, section.steps + 1)
    parts = epochs(units, steps, section.rows_per_step, context.config.run.seed, stage)
    with fewer_collections():
        await run_loop(_numbered(steps, parts), batches, {POLICY: trainer}, {}, _OpenWindow(), after_step)
    await write_model(trainer, source, context.output(stage))
    return {"model": str(context.output(stage)), **totals, **checkpoints.finish()}


async def _numbered(steps: range, parts: Iterator[T]) -> AsyncIterator[tuple[int, T]]:
    for numbered in zip(steps, parts, strict=True):
        yield numbered


def epochs(units: Sequence[T], steps: range, per_step: int, seed: int, stage: str) -> Iterator[list[T]]:
    """Yield the units of each of `steps`. An epoch has every unit once, in an order that depends on (stage, seed,
    epoch) alone, so a resume needs only the number of finished steps."""
    orders: dict[int, list[int]] = {}
    for step in steps:
        places = range((step - 1) * per_step, step * per_step)
        for epoch in {place // len(units) for place in places} - orders.keys():
            orders[epoch] = _order(len(units), seed, epoch, stage)
        yield [units[orders[place // len(units)][place % len(units)]] for place in places]


def _order(count: int, seed: int, epoch: int, stage: str) -> list[int]:
    return sorted(range(count), key=lambda row: xxhash.xxh3_64_intdigest(f"{stage}/{seed}/{epoch}/{row}".encode()))
