"""One real vLLM server on a tiny model whose head is its embedding, and two other sets of weights for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparring.engine.adapters.vllm import VllmEngine
from sparring.generation import GenerateRequest, Sampling
from sparring.model.causal import CausalModel
from sparring.model.load import load
from sparring.testing.real_vllm import CONFIG, real_vllm
from sparring.testing.tiny_models import tiny_model
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


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    """Those that the server starts with, and others."""
    folder = tmp_path_factory.mktemp("vllm")
    # slow enough that a request of three thousand tokens is under way for a while
    shape = {"tied": True, "max_position_embeddings": 4096, "head_dim": 32, "num_hidden_layers": 8}
    first, second = (published(tiny_model("qwen3", folder / str(seed), seed=seed, **shape)) for seed in (4, 9))
    return first, second


@pytest.fixture
def run(weights: tuple[Weights, Weights]) -> Callable[..., Any]:
    """Plays a scenario with an engine that serves the first weights as version 4."""

    def played(scenario: Callable[[VllmEngine], Awaitable[Any]], **settings: Any) -> Any:
        async def main() -> Any:
            config = msgspec.structs.replace(CONFIG, **settings)
            engine = VllmEngine(real_vllm(weights[0].path), config, version=3, keep_server=True)
            try:
                await engine.pull(weights[0].at(4))
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    return played


def turn(name: str = "r", tokens: tuple[int, ...] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id=name, tokens=tokens, sampling=Sampling(**{"max_tokens": 12, "seed": 1, **sampling}))
