"""What a cluster of one process makes once, and closes."""

import asyncio
from dataclasses import replace
from pathlib import Path

from common.served import ServerThread

from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling
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


def test_a_server_that_is_dead_when_a_stage_begins_joins_when_it_answers(tmp_path: Path) -> None:
    path = tiny_model("qwen3", tmp_path / "policy")
    sockets = [tmp_path / name for name in ("there", "late")]
    config = EngineConfig(kind="remote", urls=tuple(f"unix:{socket}" for socket in sockets), silent_s=0.2)
    models = {"policy": ModelConfig(path=str(path))}
    cluster = InlineCluster(models=models, train=TrainConfig(), engine=config, device="cpu", threads=1)
    ask = GenerateRequest(id="", tokens=(5, 6, 7), sampling=Sampling(max_tokens=4))

    def served(socket: Path) -> ServerThread:
        return ServerThread(NativeEngine(load(path), EngineConfig(), threads=1), path, unix=socket)

    async def sampled() -> None:
        engine = cluster.engine("policy", path=str(path))
        await engine.pull(publish("policy", 1, load(path).state()))
        answers = [await engine.generate(ask)]
        assert engine.metrics["engines_now"] == 1
        threads.append(await asyncio.to_thread(served, sockets[1]))
        async with asyncio.timeout(60):
            while engine.metrics["engines_now"] == 1:
                answers.append(await engine.generate(ask))
        answers += await asyncio.gather(*(engine.generate(replace(ask, id=str(n), tokens=(n,))) for n in (1, 2)))
        assert {answer.versions.values for answer in answers} == {(1,)} and engine.metrics["completions"] == len(
            answers
        )
        await cluster.close()

    threads = [served(sockets[0])]
    try:
        asyncio.run(sampled())
    finally:
        for thread in threads:
            thread.stop()
