"""What a cluster of one process makes once, and closes."""

import asyncio
from pathlib import Path

from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.model.config import ModelConfig
from sparring.model.load import load
from sparring.model.save import save
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig


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
