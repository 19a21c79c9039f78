"""What a cluster of one process makes once, and closes."""

import asyncio
import math
from pathlib import Path

import pytest
import torch

from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.engine.noise import disturbed
from sparring.generation import ScoreRequest
from sparring.model.config import ModelConfig
from sparring.model.load import load
from sparring.model.save import save
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.weights.inline import publish


def test_a_reward_model_is_loaded_once_until_the_cluster_is_closed(tmp_path: Path) -> None:
    """However many evaluations ask for it; another folder is another model."""
    first = tiny_model("qwen3", tmp_path / "policy")
    scalar = [str(save(load(first, head="new scalar").state(), first, tmp_path / name)) for name in ("one", "other")]
    models = {"policy": ModelConfig(path=str(first))}
    cluster = InlineCluster(models=models, train=TrainConfig(), engine=EngineConfig(), device="cpu", threads=1)

    async def asked() -> None:
        one = cluster.value_model("policy", path=scalar[0])
        assert cluster.value_model("policy", path=scalar[0]) is one
        assert cluster.value_model("policy", path=scalar[1]) is not one
        before = await one.values([[1, 2, 3]])
        await cluster.close()
        again = cluster.value_model("policy", path=scalar[0])
        assert again is not one and await again.values([[1, 2, 3]]) == before, "the one before is closed"
        await cluster.close()

    asyncio.run(asked())


def test_noise_is_of_the_asked_size_and_the_same_every_time() -> None:
    state = {"a": torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * 5, "b": torch.full((50, 4), 0.5)}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    one, again = disturbed(state, 0.1), disturbed(state, 0.1)
    for name, tensor in state.items():
        assert torch.equal(tensor, kept[name]) and torch.equal(one[name], again[name])
        share = (one[name] - tensor).square().mean().sqrt() / tensor.square().mean().sqrt()
        assert share == pytest.approx(0.1, rel=0.1)
    assert not torch.allclose(one["a"][:50, :4] - kept["a"][:50, :4], (one["b"] - kept["b"]) * 10)


def test_only_the_policy_s_engine_is_disturbed_and_stays_so(tmp_path: Path) -> None:
    folder = str(tiny_model("qwen3", tmp_path / "policy"))
    noisy = EngineConfig(weight_noise=0.05)
    assert EngineConfig().exact and not noisy.exact
    models = {name: ModelConfig(path=folder) for name in ("policy", "teacher")}
    request = ScoreRequest(id="s", tokens=(1, 2, 3, 4, 5, 6))

    async def scores(config: EngineConfig) -> list[tuple[float, ...]]:
        cluster = InlineCluster(models=models, train=TrainConfig(), engine=config, device="cpu", threads=1)
        policy, teacher = cluster.engine("policy", path=folder), cluster.engine("teacher", path=folder)
        found = [(await engine.score(request)).logprobs for engine in (policy, teacher)]
        state = load(folder).state()
        await policy.pull(publish("policy", 1, state, ((1, 2, 3), (0.0, 0.0)) if config.weight_noise else None))
        found.append((await policy.score(request)).logprobs)
        await cluster.close()
        return [tuple(value for value in logprobs if value is not None and math.isfinite(value)) for logprobs in found]

    exact, disturbed_ = asyncio.run(scores(EngineConfig())), asyncio.run(scores(noisy))
    assert exact[0] == exact[1] == exact[2] == disturbed_[1]
    assert disturbed_[0] == disturbed_[2] != exact[0], "the same error in every version"
