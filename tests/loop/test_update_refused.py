"""A run whose engine refuses an update ends by name, with its last step saved, and goes on when the engine is well."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparring.errors import WeightsError
from sparring.protocols import Engine, TrainPlan
from sparring.types import WeightRef

SETTINGS = ("rl.steps=3", "rl.train.save_every=0", "engine.update_retries=1", "engine.update_retry_delay_s=0.0")


class Refusing:
    """The engine, which takes no weights of one version."""

    def __init__(self, engine: Engine, version: int) -> None:
        self._engine, self._refused = engine, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def pull(self, ref: WeightRef) -> None:
        """Raises WeightsError for that version."""
        if ref.version == self._refused:
            raise WeightsError("no room for them")
        await self._engine.pull(ref)


class RefusingCluster:
    """A cluster with such an engine."""

    def __init__(self, cluster: Any, version: int) -> None:
        self._cluster, self._refused = cluster, version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def engine(self, name: str, *, path: str) -> Any:
        """Of the policy and of no other."""
        return Refusing(self._cluster.engine(name, path=path), self._refused)

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Any:
        """The cluster's own."""
        return self._cluster.trainer(name, path=path, plan=plan)


def test_a_run_whose_update_is_refused_is_gone_on_with_to_the_same_weights(given: Path) -> None:
    from sparring.launch.run import opened
    from sparring.recipe.load import load
    from sparring.recipe.run_config import resolve
    from sparring.stages import rl

    async def trained(name: str, refused: int | None) -> tuple[str, list[str]]:
        async with opened(resolve(load(given, [*SETTINGS, f"run.name={name}"]))) as context:
            if refused is not None:
                stopped = replace(context, cluster=RefusingCluster(context.cluster, refused))
                with pytest.raises(WeightsError, match="version 2: expected an update within 2 tries, got no room for"):
                    await rl.run(stopped)
                await context.cluster.close()
                assert context.store.last_checkpoint("rl")[0].step == refused  # type: ignore[index]
            result = await rl.run(context)
            await context.cluster.close()
            weights = (Path(result["model"]) / "model.safetensors").read_bytes()
            tasks = [group.task.id for group in context.store.groups(stage="rl")]
            return hashlib.sha256(weights).hexdigest(), tasks

    assert asyncio.run(trained("stopped", 2)) == asyncio.run(trained("whole", None))
