"""A tiny model served by real engines."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from tables import with_settings

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.weights.inline import publish


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A checkpoint folder of some forty thousand parameters, 256 positions."""
    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "tiny", tied=True, seed=4)


@pytest.fixture(scope="session")
def references():
    """Of the versions 1 and 2 of a checkpoint, each trained on from the one before."""

    def of(path):
        model, refs = load(path), []
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in model.state().items():
                    parameter.mul_(1.3 if "mlp" in name or "norm" in name else 1.0)
            refs.append(publish("policy", version, model.state()))
        return refs

    return of


@pytest.fixture
def serve(model_path):
    """Run `scenario(engine)` on a fresh engine with these `[engine]` settings; returns what it returns."""

    def run(scenario, *, path=None, dtype="float32", **settings):
        @asynccontextmanager
        async def opened():
            config = with_settings(EngineConfig(), **{"max_running": 32, "max_tokens": 64, **settings})
            engine = NativeEngine(load(path or model_path, dtype=dtype), config, threads=1)
            try:
                yield engine
            finally:
                await engine.close()

        async def main():
            async with opened() as engine:
                return await scenario(engine)

        return asyncio.run(main())

    return run
