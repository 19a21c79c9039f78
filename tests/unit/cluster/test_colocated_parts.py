"""Trainer and engine in turns: what is refused before work starts, and who sleeps when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sparring.cluster.inline import InlineCluster
from sparring.cluster.turns import Turns
from sparring.engine.config import EngineConfig
from sparring.errors import BadInput
from sparring.model.config import ModelConfig
from sparring.protocols import Trainer
from sparring.recipe.run_config import RunConfig
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.train.config import TrainConfig
from sparring.types import WeightRef


@pytest.mark.parametrize(
    ("section", "settings", "said"),
    [
        ("rollout", {"max_lag": 2}, "rollout.max_lag must be 0 with cluster.colocate"),
        ("cluster", {"kind": "ray"}, 'colocate must be false with kind "ray"'),
        ("engine", {"kind": "vllm"}, 'engine.kind must be "native" with cluster.colocate, got vllm'),
        ("engine", {"kind": "remote", "urls": ["http://h:1"]}, 'must be "native" with cluster.colocate, got remote'),
        ("models", {"lora": {"rank": 4}}, "models.policy.lora must be left out with cluster.colocate"),
    ],
)
def test_what_cannot_take_turns_is_refused_with_the_recipe(section: str, settings: dict[str, Any], said: str) -> None:
    document: dict[str, Any] = {
        "run": {"name": "a", "stages": ["rl"]},
        "models": {"policy": {"path": "there"}},
        "env": {"name": "reverse"},
        "cluster": {"colocate": True},
    }
    msgspec.convert(document, RunConfig)
    changed = document["models"]["policy"] if section == "models" else document.setdefault(section, {})
    changed.update(settings)
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(document, RunConfig)


def test_a_gpu_is_refused_by_the_check() -> None:
    models = {"policy": ModelConfig(path="there")}
    settings: dict[str, Any] = {"models": models, "train": TrainConfig(), "engine": EngineConfig(), "threads": 1}
    with pytest.raises(BadInput, match='expected "cpu" with cluster.colocate, got cuda'):
        InlineCluster(**settings, device="cuda", colocate=True).check()
    assert InlineCluster(**settings, device="cuda").check() == []


def test_the_engine_sleeps_from_the_first_batch_of_an_update_until_the_weights_come() -> None:
    """However many batches and learners the update has; without an engine nobody sleeps."""

    class Computing:
        async def forward_backward(self, batch: object) -> Mapping[str, float]:
            seen.append(engine.asleep)
            return {}

    engine, seen = ScriptedEngine(lambda request: [5, 6]), list[bool]()
    turns = Turns()

    async def scenario() -> None:
        served = turns.serving(engine)
        learners = [turns.training(cast(Trainer, Computing())) for _ in range(2)]
        for version in (1, 2):
            assert not engine.asleep
            for learner in (*learners, *learners):
                await learner.forward_backward(cast(Any, SimpleNamespace()))
            await served.pull(WeightRef(model="policy", version=version, checksum="", transport="", location=None))
            assert served.version == version
        turns.end()
        await learners[0].forward_backward(cast(Any, SimpleNamespace()))

    asyncio.run(scenario())
    assert seen == [True] * 8 + [False]
