"""An update of the weights that is late or refused is tried again, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping

import pytest

from sparring.engine.config import EngineConfig, UpdateConfig
from sparring.errors import WeightsError
from sparring.loop import run_loop
from sparring.rollout.window import Window
from sparring.stages.runtime.updates import RetriedUpdates
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.types import Batch, StepResult, WeightRef


def ref(version: int) -> WeightRef:
    return WeightRef(model="policy", version=version, checksum="", transport="", location=None)


class Trainer:
    """Counts its steps and publishes nothing but their number."""

    def __init__(self) -> None:
        self.version = 0

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        return {}

    async def step(self, *, ends_update: bool = True) -> StepResult:
        self.version += 1
        return StepResult(version=self.version, metrics={})

    async def push(self) -> WeightRef:
        return ref(self.version)


class Life:
    """Two steps of the loop on an engine that refuses some updates."""

    def __init__(self, refuse_on: Collection[int]) -> None:
        self.engine = ScriptedEngine(lambda request: (), refuse_on=refuse_on)
        self.window = Window(1, 0, 2)
        self.reported: list[str] = []
        self.finished: list[int] = []
        self.released_at: list[float] = []
        self.admitted_at: list[tuple[int, float]] = []

    async def run(self) -> None:
        async def admitted() -> AsyncIterator[int]:
            while (index := await self.window.acquire()) is not None:
                self.admitted_at.append((self.engine.version, asyncio.get_running_loop().time()))
                yield index

        async def batches(groups: AsyncIterator[int]) -> AsyncIterator[Batch]:
            async for index in groups:
                yield Batch(step=index + 1, model="policy", rows=(), denominators={}, publish=True, ends_update=True)

        async def after_step(step: StepResult, batch: Batch, metrics: Mapping[str, float]) -> None:
            self.finished.append(step.version)

        updates = RetriedUpdates(self.engine, EngineConfig(update=UpdateConfig(retries=3)), self.reported.append)
        await run_loop(admitted(), batches, {"policy": Trainer()}, {"policy": updates}, self.window, after_step)


def test_a_refused_update_is_tried_again_and_the_window_stays_shut() -> None:
    life = Life(refuse_on=(1, 2))
    _, seconds = run_virtual(life.run())
    assert [pulled.version for pulled in life.engine.pulled] == [1, 2] and life.finished == [1, 2]
    (first, _), (second, began_s) = life.admitted_at
    assert (first, second) == (0, 1) and 0 < began_s == seconds < 5 + 10
    assert len(life.reported) == 2 and "version 0 serves on: update 1 was chosen to be refused" in life.reported[0]


def test_after_the_retries_the_run_ends_by_name_with_its_step_finished() -> None:
    life = Life(refuse_on=range(1, 100))
    with pytest.raises(WeightsError, match="weights of policy version 1: expected an update within 4 tries"):
        run_virtual(life.run())
    assert life.finished == [1] and life.window.released_steps == 0 and life.engine.version == 0
    assert len(life.admitted_at) == 1, "nothing was admitted behind the shut window"
