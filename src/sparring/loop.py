"""The training loop: rollouts, batch, step, publish. One pass is one optimiser step.

Three parts run side by side, and each waits for one other:

    scheduler ── groups ──▶ batches ── batch ──▶ trainer ── weights ──▶ engine
        ▲                                                                  │
        └─────────────────────── window.release(step) ◀────────────────────┘

    part        waits for                                        is unblocked by
    scheduler   a place in the window                            `window.release`, after the engine serves the weights
    loop        the next group in admission order                the last rollout of that group, scored
    engine      nothing: it samples while the trainer computes   (`pull` commits new weights between two of its steps)

With `max_lag = 0` the scheduler has no place until the step before is released, so sampling and training take turns.
With more they overlap. Only `rollout/window.py` knows `max_lag`, only the scheduler the order of groups, and only
`batch/` how batches are made. No tensor passes through this module.
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
        """Admit the rollouts that may begin once the weights of `step` are served."""


class ServesWeights(Protocol):
    """Server of published weights: an `Engine`, or a wrapper that retries its updates."""

    async def pull(self, ref: WeightRef) -> None:
        """Load and serve published weights. Raises WeightsError if they could not be fetched or verified; the old
        weights are still served."""


AfterStep = Callable[[StepResult, Batch, Mapping[str, float]], Awaitable[None]]
"""Writes checkpoints and reports after an update, given the new version, its last batch and the metrics."""


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
        rollouts: scored groups in admission order (law 5), or rows of a file; closed at the end.
        batches: function that turns rollouts into batches, one per optimiser step. The last batch of an update ends it.
        trainers: trainers by model name; `batch.model` selects one.
        engines: engines by model name; each serves what the trainer of that name publishes.
        window: window of admission, opened for the next update once the engine serves this update's weights.
        after_step: function awaited after each update, so that a checkpoint never splits one.

    Raises:
        WeightsError: the engine rejected an update and still serves the old version. The update itself is complete:
            `after_step` was awaited, but the window was not opened.
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
