"""The run, start to finish: rollouts, batch, step, publish. One pass through this loop is one optimiser step.

Synchronous and asynchronous training are this same loop: `max_lag` is known to `rollout/window.py` alone, the order of
groups to the scheduler, what is learned from them to `batch/`. No tensor passes through this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Protocol, TypeVar, cast

from sparring.errors import WeightsError
from sparring.observe.metrics import merged
from sparring.protocols import Trainer
from sparring.types import Batch, StepResult, WeightRef

T = TypeVar("T")


class StepWindow(Protocol):
    """Decides how far rollouts run ahead of training."""

    def release(self, step: int) -> None:
        """Let in the rollouts that may begin once the weights of `step` are being served."""


class ServesWeights(Protocol):
    """Part that serves published weights: an `Engine`, or what tries its updates again."""

    async def pull(self, ref: WeightRef) -> None:
        """Serve published weights. Raises `WeightsError` and serves the old ones where they fail."""


AfterStep = Callable[[StepResult, Batch, Mapping[str, float]], Awaitable[None]]
"""Checkpoints and reports: called with the new version, the batch that made it, and the metrics of the update."""


async def run_loop(
    rollouts: AsyncIterator[T],
    batches: Callable[[AsyncIterator[T]], AsyncIterator[Batch]],
    trainers: Mapping[str, Trainer],
    engines: Mapping[str, ServesWeights],
    window: StepWindow,
    after_step: AfterStep,
) -> None:
    """Train until there are no more batches.

    Args:
        rollouts: scored groups in admission order (law 5), or rows of a file. Closed at the end.
        batches: makes batches of rollouts, one per optimiser step. An update is made of one batch or of several, the
            last of which ends it.
        trainers: by model name; `batch.model` picks one.
        engines: by model name; each serves what the trainer of that name publishes.
        window: opened for the next update only after the engine serves this update's weights.
        after_step: awaited after each update, so that a checkpoint is always of a finished one.

    Raises:
        WeightsError: an update failed; the engine still serves the old version. The step that made it is finished:
            `after_step` was awaited, and the window stayed shut.
    """
    steps: list[Mapping[str, float]] = []
    async with aclosing(cast(AsyncGenerator[T], rollouts)):
        async for batch in batches(rollouts):
            trainer = trainers[batch.model]
            metrics = await trainer.forward_backward(batch)
            step = await trainer.step(ends_update=batch.ends_update)
            steps.append({**metrics, **step.metrics})
            if not batch.ends_update:
                continue
            if batch.publish:
                try:
                    await engines[batch.model].pull(await trainer.push())
                except WeightsError:
                    await after_step(step, batch, merged(steps))
                    raise
            window.release(batch.step)
            await after_step(step, batch, merged(steps))
            steps.clear()
            await asyncio.sleep(0)  # rollouts of the new version start before the next batch is awaited
