"""The run, start to finish: one pass through this loop is one optimiser step, and the last of an update serves its
weights.

Synchronous and asynchronous training are this same loop. How far rollouts may run ahead of it is the window's business
(`max_lag`), in which order groups arrive is the scheduler's, what is learnt from them is the batch's. This module
knows none of that, and no tensor ever passes through it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from sparring.observe.metrics import merged
from sparring.protocols import Engine, Trainer
from sparring.types import Batch, StepResult


class Window(Protocol):
    """Lets rollouts in; told when a step's weights are being served."""

    def release(self, step: int) -> None: ...


_YOUNG_OBJECTS = 20_000
"""That many more objects than before, and the garbage collector looks at them (700 as Python comes)."""

AfterStep = Callable[[StepResult, Batch, Mapping[str, float]], Awaitable[None]]
"""Checkpoints, reports and progress: called with the new version, the batch it was made of and the merged metrics."""


async def run_loop(
    batches: AsyncIterator[Batch],
    trainers: Mapping[str, Trainer],
    engines: Mapping[str, Engine],
    window: Window,
    after_step: AfterStep,
) -> None:
    """Train until `batches` ends.

    Args:
        batches: one per optimiser step, in admission order (law 5); one that does not end its update belongs to the
            next.
        trainers: by model name; `batch.model` picks one.
        engines: by model name; the one that serves what was trained.
        window: opened for the next step only after the engine serves this step's weights.
        after_step: awaited before the next batch is taken, so a checkpoint is always of a finished update.

    Raises:
        WeightsError: an update failed its verification; the engine still serves the old version.
    """
    with _settled():
        steps: list[Mapping[str, float]] = []
        async for batch in batches:
            trainer = trainers[batch.model]
            metrics = await trainer.forward_backward(batch)
            step = await trainer.step(ends_update=batch.ends_update)
            steps.append({**metrics, **step.metrics})
            if not batch.ends_update:
                continue
            if batch.publish:
                await engines[batch.model].pull(await trainer.push())
            window.release(batch.step)
            await after_step(step, batch, merged(steps))
            steps.clear()
            await asyncio.sleep(0)  # let rollouts of the new version start before the next batch is awaited


@contextmanager
def _settled() -> Iterator[None]:
    """Keep the garbage collector off what lives already: models, libraries, modules. Walking it took a thirtieth of the
    run.

    It comes less often, too: a step's rollouts are tens of thousands of objects in no cycle, which go when the step is
    over.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
