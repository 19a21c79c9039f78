"""What the tests of the real vLLM ask for, and weights to serve."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparring.generation import GenerateRequest, Sampling
from sparring.model.causal import CausalModel
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import WeightRef

PROMPT = (5, 6, 7, 8, 9, 10)


@dataclass(frozen=True)
class Weights:
    """A checkpoint, and what a trainer of it publishes."""

    path: Path
    ref: WeightRef

    def at(self, version: int, **changes: Any) -> WeightRef:
        """Published as that version."""
        return replace(self.ref, version=version, **changes)

    def model(self) -> CausalModel:
        """Ours, to judge vLLM by."""
        return load(self.path)


def published(path: Path) -> Weights:
    async def pushed() -> WeightRef:
        trainer = LocalTrainer(load(path), TrainConfig(), [], name="policy", total_steps=1, threads=1)
        try:
            return await trainer.push()
        finally:
            await trainer.close()

    return Weights(path, asyncio.run(pushed()))


def turn(name: str = "r", tokens: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id=name, tokens=tokens, sampling=Sampling(**{"max_tokens": 12, "seed": 1, **sampling}))
