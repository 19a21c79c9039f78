"""One real vLLM server on a tiny model whose head is its embedding, and two sets of weights for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from real_vllm import CONFIG, real_vllm
from served import Weights, published
from tables import with_settings

from sparring.engine.adapters.vllm import VllmEngine
from sparring.testing.tiny_models import tiny_model


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
            config = with_settings(CONFIG, **settings)
            engine = VllmEngine(real_vllm(weights[0].path), config, version=3, keep_server=True)
            try:
                await engine.pull(weights[0].at(4))
                return await scenario(engine)
            finally:
                await engine.close()

        return asyncio.run(main())

    return played
