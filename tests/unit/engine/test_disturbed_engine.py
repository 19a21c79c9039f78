"""An engine with a known error in its weights, seen through the server by which a run reaches it."""

from pathlib import Path

import pytest
import torch
from common.disturbed_engine import DisturbedEngine, disturbed
from common.served import RemoteToThread
from virtual import on_event_loop

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import ScoreRequest
from sparring.model.load import load
from sparring.protocols import Engine
from sparring.testing.tiny_models import tiny_model
from sparring.weights.inline import publish


def test_the_error_has_the_requested_size_and_is_the_same_every_time() -> None:
    state = {"a": torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 5, "b": torch.full((50, 4), 0.5)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    first, second = disturbed(state, 0.1), disturbed(state, 0.1)
    for name, tensor in state.items():
        assert torch.equal(tensor, before[name]) and torch.equal(first[name], second[name])
        share = (first[name] - tensor).square().mean().sqrt() / tensor.square().mean().sqrt()
        assert share == pytest.approx(0.1, rel=0.1)
    assert not torch.allclose(first["a"][:50, :4] - before["a"][:50, :4], (first["b"] - before["b"]) * 10)


@on_event_loop
async def test_a_run_sees_the_same_error_in_every_version(tmp_path: Path) -> None:
    """Whether the weights were loaded, sent at the start of a run or published by its trainer with a probe."""
    folder = tiny_model("qwen3", tmp_path / "policy")
    request = ScoreRequest(id="s", tokens=(1, 2, 3, 4, 5, 6))

    async def scores(engine: Engine) -> tuple[float, ...]:
        return (await engine.score(request)).logprobs

    state = load(folder).state()
    exact = NativeEngine(load(folder), EngineConfig(), threads=1)
    expected = await scores(exact)
    await exact.close()
    remote = RemoteToThread(DisturbedEngine(load(folder), EngineConfig(), noise=0.05, threads=1), folder)
    served = [await scores(remote)]
    remote.begin(state)
    served.append(await scores(remote))
    await remote.pull(publish("policy", 1, state, ((1, 2, 3), (0.0, 0.0))))
    served.append(await scores(remote))
    assert remote.version == 1
    await remote.close()
    assert served[0] == served[1] == served[2] != expected
