"""`Turns`: trainer and engine of the policy on the same cores and memory, one after the other (`cluster.colocate`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from sparring.observe.hooks import Overlay
from sparring.protocols import Engine, Trainer
from sparring.types import Batch, WeightRef


class Turns:
    """Turns of one stage. The engine sleeps from the first batch of an update until the engine gets the next weights.
    Its requests, such as those of an evaluation, wait meanwhile.

    The last batch of each update is published (`batch.batches`), so that the engine always wakes.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def serving(self, engine: Engine) -> Engine:
        """Wrap `engine` to take turns with the trainer: each update of its weights wakes it."""

        async def pull(ref: WeightRef) -> None:
            from sparring.kernels.memory import give_back  # imports torch, which the trainer has imported

            await asyncio.to_thread(give_back, 0)  # the gradients
            await engine.wake(ref)

        self._engine = engine
        return cast(Engine, Overlay(engine, {"pull": pull}))

    def training(self, trainer: Trainer) -> Trainer:
        """Wrap `trainer` to take turns with the engine: the engine sleeps before the trainer computes gradients."""

        async def forward_backward(batch: Batch) -> Mapping[str, float]:
            if self._engine is not None:
                await self._engine.sleep()
            return await trainer.forward_backward(batch)

        return cast(Trainer, Overlay(trainer, {"forward_backward": forward_backward}))

    def end(self) -> None:
        """Forget the engine of a stage that is over."""
        self._engine = None
