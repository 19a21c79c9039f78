"""Which checkpoints are there after a stop: those that an uninterrupted run would have kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sparring.model.load import load
from sparring.stages.runtime.checkpoints import Checkpoints
from sparring.store.sqlite import SqliteStore
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import CheckpointRef

REWARDS = (0.1, 0.9, 0.3, 0.2, 0.4, 0.5)
"""By step, from 1: the second is the best."""


async def train(model: Path, folder: Path, until: int, highest: bool) -> int:
    """One life of a stage, up to step `until`: resumes, saves every step and ends without saying goodbye."""
    config = TrainConfig(save_every=1, keep_last=2, best_metric="reward", best_is_highest=highest)
    store = SqliteStore(folder / "store.sqlite")
    trainer = LocalTrainer(load(model), config, [], name="policy", total_steps=len(REWARDS))
    checkpoints = Checkpoints(
        trainer=trainer, store=store, stage="rl", folder=folder / "rl", config=config, last_step=len(REWARDS)
    )
    done, state = await checkpoints.resume()
    store.truncate("rl", done)
    assert state == ({"step": done} if done else {})
    for reward in REWARDS[done:until]:
        step = await trainer.step()
        await checkpoints.after(step, {"reward": reward}, {"step": step.version})
    await trainer.close()
    store.close()
    return done


def kept(model: Path, folder: Path, lives: Sequence[int], highest: bool = True) -> list[str]:
    found = [asyncio.run(train(model, folder, until, highest)) for until in lives]
    assert found == [0, *lives[:-1]]
    return sorted(path.name for path in (folder / "rl/checkpoints").iterdir())


def test_a_resume_keeps_the_best_checkpoint_and_as_many_of_the_last(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    whole = kept(model, tmp_path / "whole", [6])
    assert whole == ["step-000002", "step-000005", "step-000006"]
    assert kept(model, tmp_path / "stopped", [3, 4, 6]) == whole


def test_a_resume_remembers_the_lowest_where_that_is_the_best(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    assert kept(model, tmp_path, [3, 6], highest=False) == ["step-000001", "step-000005", "step-000006"]


def test_another_trainer_comes_and_goes_with_the_first(tmp_path: Path) -> None:
    """A critic's state lies inside the policy's checkpoint: both are restored from one step, and both are dropped
    together."""
    model = tiny_model("qwen3", tmp_path / "model")

    async def lives() -> None:
        for until in (2, 4):
            store = SqliteStore(tmp_path / "store.sqlite")
            policy, critic = (
                LocalTrainer(load(model), TrainConfig(), [], name=name, total_steps=4) for name in ("policy", "critic")
            )
            checkpoints = Checkpoints(
                trainer=policy,
                store=store,
                stage="rl",
                folder=tmp_path / "rl",
                config=TrainConfig(save_every=1, keep_last=2),
                last_step=4,
                beside={"critic": critic},
            )
            done, _ = await checkpoints.resume()
            assert (policy.version, critic.version) == (done, 0)
            for _ in range(done, until):
                await critic.step(ends_update=False)
                await checkpoints.after(await policy.step(), {}, {})
            for trainer in (policy, critic):
                await trainer.close()
            store.close()

    asyncio.run(lives())
    folders = sorted(path.name for path in (tmp_path / "rl/checkpoints").iterdir())
    assert folders == ["step-000003", "step-000004"]
    for folder in folders:
        found = json.loads((tmp_path / "rl/checkpoints" / folder / "critic/trainer.json").read_text())
        assert (found["model"], found["optimiser_steps"]) == ("critic", int(folder[-1]))


class CountingStore:
    """A store that counts how often it is asked for all checkpoints."""

    def __init__(self, store: SqliteStore) -> None:
        self._store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def checkpoints(self, stage: str) -> Sequence[CheckpointRef]:
        """As the store's."""
        self.asked += 1
        return self._store.checkpoints(stage)


def test_a_save_does_not_look_at_every_checkpoint_there_ever_was(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "model")
    config = TrainConfig(save_every=1, keep_last=2, best_metric="reward")

    async def life(until: int) -> None:
        with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
            counted: Any = CountingStore(store)
            trainer = LocalTrainer(load(model), config, [], name="policy", total_steps=8)
            folder = tmp_path / "rl"
            checkpoints = Checkpoints(
                trainer=trainer, store=counted, stage="rl", folder=folder, config=config, last_step=8
            )
            done, _ = await checkpoints.resume()
            for number in range(done, until):
                await checkpoints.after(await trainer.step(), {"reward": -float(number == 0)}, {"state": "x" * 1000})
            await trainer.close()
            assert counted.asked == 1
            kept = [2, until - 1, until]  # the first of the best, and the last two
            assert [ref.step for ref in store.checkpoints("rl")] == kept
            rows = store._rows("SELECT step, length(state) > 1000 FROM checkpoints WHERE superseded = 0 ORDER BY step")
            assert rows == [(step, 1) for step in kept], "no row counts whose weights are gone"
            ((size,),) = store._rows("SELECT sum(length(state)) FROM checkpoints WHERE superseded = 1")
            assert size == 0, "nor does its state take room"

    asyncio.run(life(5))
    asyncio.run(life(8))
    assert len(list((tmp_path / "rl/checkpoints").iterdir())) == 3
