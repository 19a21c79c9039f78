"""Which checkpoints are there after a stop: those that an uninterrupted run would have kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from rank_threads import RankThread
from stored import sql

from sparring.cluster.ranks import RankTrainer
from sparring.cluster.trainer import TrainerParts
from sparring.errors import StoreError
from sparring.model.config import ModelConfig
from sparring.model.load import load
from sparring.protocols import Trainer, TrainPlan
from sparring.stages.runtime.checkpoints import Checkpoints, Keeping
from sparring.store.sqlite import SqliteStore
from sparring.testing.tiny_models import tiny_model
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import CheckpointRef

REWARDS = (0.1, 0.9, 0.3, 0.2, 0.4, 0.5)
"""By step, from 1: the second is the best."""


@asynccontextmanager
async def opened(
    run: Path,
    keeping: Keeping,
    trainer: Callable[[str], Trainer],
    *names: str,
    counted: Callable[[SqliteStore], Any] = lambda store: store,
    say: Callable[[str], None] = print,
) -> AsyncIterator[tuple[SqliteStore, Checkpoints, list[Trainer]]]:
    """One life of a stage with a policy and trainers of other names; it ends without saying goodbye."""
    with closing(SqliteStore(run / "store.sqlite")) as store:
        trainers = {name: trainer(name) for name in ("policy", *names)}
        checkpoints = Checkpoints(
            trainer=trainers["policy"],
            store=counted(store),
            stage="rl",
            folder=run / "rl",
            keeping=keeping,
            beside={name: trainers[name] for name in names},
            say=say,
        )
        try:
            yield store, checkpoints, [*trainers.values()]
        finally:
            for each in trainers.values():
                await each.close()


def local(model: Path, keeping: Keeping) -> Callable[[str], Trainer]:
    """A trainer of a name in this process."""
    return lambda name: LocalTrainer(load(model), keeping.train, [], name=name, total_steps=keeping.last_step)


async def train(model: Path, folder: Path, until: int, highest: bool) -> int:
    """Resume, and save every step up to step `until`."""
    config = TrainConfig(save_every=1, keep_last=2, best_metric="reward", best_is_highest=highest)
    keeping = Keeping(train=config, last_step=len(REWARDS))
    async with opened(folder, keeping, local(model, keeping)) as (store, checkpoints, [trainer]):
        done, state = await checkpoints.resume()
        store.truncate("rl", done)
        assert state == ({"step": done} if done else {})
        for reward in REWARDS[done:until]:
            step = await trainer.step()
            await checkpoints.after(step, {"reward": reward}, {"step": step.version})
    return done


def kept(model: Path, folder: Path, lives: Sequence[int], highest: bool = True) -> list[str]:
    found = [asyncio.run(train(model, folder, until, highest)) for until in lives]
    assert found == [0, *lives[:-1]]
    return folders(folder)


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
    keeping = Keeping(train=TrainConfig(save_every=1, keep_last=2), last_step=4)

    async def lives() -> None:
        for until in (2, 4):
            async with opened(tmp_path, keeping, local(model, keeping), "critic") as (_, checkpoints, trainers):
                policy, critic = trainers
                done, _ = await checkpoints.resume()
                assert (policy.version, critic.version) == (done, 0)
                for _ in range(done, until):
                    await critic.step(ends_update=False)
                    await checkpoints.after(await policy.step(), {}, {})

    asyncio.run(lives())
    assert folders(tmp_path) == ["step-000003", "step-000004"]
    for folder in folders(tmp_path):
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
    keeping = Keeping(train=TrainConfig(save_every=1, keep_last=2, best_metric="reward"), last_step=8)

    async def life(until: int) -> None:
        stores: list[CountingStore] = []

        def counted(store: SqliteStore) -> CountingStore:
            stores.append(CountingStore(store))
            return stores[0]

        async with opened(tmp_path, keeping, local(model, keeping), counted=counted) as (store, checkpoints, [trainer]):
            done, _ = await checkpoints.resume()
            for number in range(done, until):
                await checkpoints.after(await trainer.step(), {"reward": -float(number == 0)}, {"state": "x" * 1000})
            assert stores[0].asked == 1
            kept = [2, until - 1, until]  # the first of the best, and the last two
            assert [ref.step for ref in store.checkpoints("rl")] == kept
        rows = sql(tmp_path, "SELECT step, length(state) > 1000 FROM checkpoints WHERE superseded = 0 ORDER BY step")
        assert rows == [(step, 1) for step in kept], "no row counts whose weights are gone"
        [(size,)] = sql(tmp_path, "SELECT sum(length(state)) FROM checkpoints WHERE superseded = 1")
        assert size == 0, "nor does its state take room"

    asyncio.run(life(5))
    asyncio.run(life(8))
    assert len(list((tmp_path / "rl/checkpoints").iterdir())) == 3


def test_the_best_by_held_out_tasks_is_kept_until_its_evaluation_has_spoken(tmp_path: Path) -> None:
    """What is evaluated is saved, whatever `save_every` says; a checkpoint stays as long as its result is to come, and
    an evaluation that was left out says nothing."""
    model = tiny_model("qwen3", tmp_path / "model")
    train = TrainConfig(save_every=0, keep_last=1, best_metric="rl/eval/success")
    keeping = Keeping(train=train, last_step=10, eval_every=2)
    said: list[str] = []

    async def life() -> dict[str, Any]:
        parts = opened(tmp_path, keeping, local(model, keeping), say=said.append)
        async with parts as (store, checkpoints, [trainer]):
            for number in range(1, 11):
                await checkpoints.after(await trainer.step(), {"rollout/reward": float(number)}, {})
                if number == 5:
                    assert folders(tmp_path) == ["step-000002", "step-000004"], "neither is evaluated yet"
                    store.metric("rl/eval", 2, {"success": 0.5})
                if number == 7:  # that of step 4 was left out
                    store.metric("rl/eval", 6, {"success": 0.25})
                    assert folders(tmp_path) == ["step-000002", "step-000004", "step-000006"]
            assert folders(tmp_path) == ["step-000002", "step-000008", "step-000010"]
            store.metric("rl/eval", 8, {"success": 0.75})
            store.metric("rl/eval", 10, {"success": 0.75})
            return checkpoints.finish()

    best = {"step": 8, "metric": "rl/eval/success", "value": 0.75}
    assert asyncio.run(life()) == {"best": best}
    assert folders(tmp_path) == ["step-000008", "step-000010"]
    assert json.loads((tmp_path / "rl/best.json").read_text()) == best and "step 8" in said[-1]


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "rl/checkpoints").iterdir())


@pytest.mark.parametrize("damaged", [(3,), (3, 2), (3, 2, 1)])
def test_a_damaged_checkpoint_is_passed_over_where_that_is_asked_for(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    """Also where it is the critic's part that is damaged, and where none is left: what was read before is not kept."""
    model = tiny_model("qwen3", tmp_path / "model")
    train = TrainConfig(save_every=1, keep_last=3)

    async def life(passes_over: bool, until: int) -> tuple[int, int]:
        keeping = Keeping(train=train, last_step=3, passes_over=passes_over)
        async with opened(tmp_path, keeping, local(model, keeping), "critic") as (_, checkpoints, [policy, _]):
            done, state = await checkpoints.resume()
            assert state == ({"step": done} if done else {}) and policy.version == done
            for step in range(done + 1, until + 1):
                await checkpoints.after(await policy.step(), {}, {"step": step})
            return done, policy.version

    assert asyncio.run(life(False, 3)) == (0, 3)
    for step in damaged:
        os.truncate(tmp_path / f"rl/checkpoints/step-{step:06d}/critic/model.safetensors", 100)
    with pytest.raises(StoreError, match="run.damaged=pass_over"):
        asyncio.run(life(False, 3))
    left = 3 - len(damaged)
    assert asyncio.run(life(True, left)) == (left, left)
    aside = [name for name in folders(tmp_path) if name.startswith("damaged")]
    assert aside == [f"damaged-step-{step:06d}" for step in sorted(damaged)], "nothing is removed"
    assert asyncio.run(life(False, 3)) == (left, 3)


HARMS = {
    "gone": Path.unlink,
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
}


class Life:
    """Lives of a stage with a policy, its moving average and a critic, each trained by `ranks` ranks."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._model, self._ranks = folder, tiny_model("qwen3", folder / "model"), ranks

    def _trainer(self, name: str) -> Trainer:
        own: dict[str, Any] = {"teachers": {"slow": None}, "averages": {"slow": 0.5}} if name == "policy" else {}
        parts = TrainerParts(
            name="policy",
            path=str(self._model),
            plan=TrainPlan(losses=[], total_steps=3, overrides={}, name=name, **own),
            models={"policy": ModelConfig(path=str(self._model))},
            train=TrainConfig(save_every=1, keep_last=3),
            device="cpu",
            threads=1,
        )
        return parts.trainer() if self._ranks == 1 else RankTrainer(parts, _threads, self._ranks, 60.0)

    def live(self, steps: int) -> int:
        """Resume, train up to a step, and return the step that was resumed from."""
        return asyncio.run(self._life(steps))

    async def _life(self, steps: int) -> int:
        keeping = Keeping(train=TrainConfig(save_every=1, keep_last=3), last_step=3, passes_over=True)
        async with opened(self._folder, keeping, self._trainer, "critic") as (_, checkpoints, [policy, _]):
            done, _ = await checkpoints.resume()
            for _ in range(done, steps):
                await checkpoints.after(await policy.step(), {}, {})
        return done


def _threads(count: int) -> Iterator[RankThread]:
    return (RankThread() for _ in range(count))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_that_lacks_any_of_its_files_is_passed_over(tmp_path: Path, ranks: int) -> None:
    """Each file of a real checkpoint in its turn, those of ranks and of the critic too: gone, cut short, empty."""
    life = Life(tmp_path, ranks)
    assert life.live(2) == 0
    newest = tmp_path / "rl/checkpoints/step-000002"
    aside = newest.with_name("damaged-step-000002")
    files = sorted(file for file in newest.rglob("*") if file.is_file())
    shards = ["optimiser"] if ranks == 1 else ["optimiser-1-of-2", "optimiser-2-of-2"]
    own = ["model.safetensors", "trainer.json", *(f"{shard}.safetensors" for shard in shards)]
    expected = ["average-slow.safetensors", *own, *(f"critic/{name}" for name in own)]
    assert [str(file.relative_to(newest)) for file in files] == sorted(expected)
    for number, file in enumerate(files):
        whole = file.read_bytes()
        [*HARMS.values()][number % len(HARMS)](file)
        assert life.live(1) == 1, file
        assert folders(tmp_path) == ["damaged-step-000002", "step-000001"], file
        aside.rename(newest)
        file.write_bytes(whole)
    assert life.live(2) == 2
    shutil.rmtree(newest / "critic")
    assert life.live(1) == 1
