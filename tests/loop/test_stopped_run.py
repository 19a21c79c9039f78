"""A run whose engine refuses an update, or whose environment stays down, ends by name with its last step saved, and goes
on when that is mended."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparring.errors import Outage, ToolHostError, WeightsError
from sparring.protocols import Engine, TrainPlan
from sparring.stages.context import Context
from sparring.types import WeightRef

SETTINGS = (
    "rl.steps=3",
    "rollout.retries.outage_s=1",
    "rollout.retries.delay_s=0.0",
    "rl.train.save_every=0",
    "engine.update.retries=1",
    "engine.update.retry_delay_s=0.0",
)


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


class DeadFrom:
    """A factory whose worlds have no host from the n-th on."""

    def __init__(self, factory: Any, first: int) -> None:
        self._factory, self._first, self.made = factory, first, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._factory, name)

    def make(self) -> Any:
        """The next one."""
        self.made += 1
        if self.made >= self._first:
            raise ToolHostError("no route to the host")
        return self._factory.make()


def published(context: Context) -> list[str]:
    """The steps whose weights are in the log."""
    return [entry.name for _, entry in context.store.entries("rl", kinds=["published"])]


def refusing(context: Context) -> Context:
    """A context whose engine takes no weights of version 2."""
    return replace(context, cluster=RefusingCluster(context.cluster, 2))


def dead(context: Context) -> Context:
    """A context whose environment is down from the third step on."""
    rollouts = context.config.rl.groups_per_step * context.config.rollout.group_size
    return replace(context, factory=DeadFrom(context.factory, 2 * rollouts + 1))


NO_ROOM = "version 2: expected an update within 2 tries, got no room for them"
DOWN = "expected a rollout that its infrastructure does not break within 1 s, got no route to the host"


@pytest.mark.parametrize(
    ("stopped", "error", "message", "gone"),
    [
        pytest.param(refusing, WeightsError, NO_ROOM, False, marks=pytest.mark.full),
        (refusing, WeightsError, NO_ROOM, True),  # as if killed before its manifest, or somebody tidied up
        (dead, Outage, DOWN, False),
    ],
)
def test_a_stopped_run_is_gone_on_with_to_the_same_weights(
    given: Path, stopped: Callable[[Context], Context], error: type[Exception], message: str, gone: bool
) -> None:
    """A refused version is in the log: the saved weights are compared with it, and so is the step if it is trained
    again from the start, its weights gone."""
    from sparring.launch.run import opened
    from sparring.recipe.load import load
    from sparring.recipe.run_config import resolve
    from sparring.stages import rl

    async def trained(name: str, stopped: Callable[[Context], Context] | None) -> tuple[str, list[str]]:
        async with opened(resolve(load(given, [*SETTINGS, f"run.name={name}"]))) as context:
            if stopped is not None:
                with pytest.raises(error, match=message):
                    await rl.run(stopped(context))
                await context.cluster.close()
                last = context.store.last_checkpoint("rl")
                assert last is not None and last[0].step == 2
                assert published(context) == ["rl@1", "rl@2"]
                if gone:
                    shutil.rmtree(last[0].path)
            result = await rl.run(context)
            await context.cluster.close()
            assert published(context) == ["rl@1", "rl@2", "rl@3"]
            weights = (Path(result["model"]) / "model.safetensors").read_bytes()
            tasks = [group.task.id for group in context.store.groups(stage="rl")]
            return hashlib.sha256(weights).hexdigest(), tasks

    assert asyncio.run(trained("stopped", stopped)) == asyncio.run(trained("whole", None))
