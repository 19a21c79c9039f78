"""A trainer whose ranks are lost, wherever it happens, has the bits of one whose ranks are not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from test_trainer import FULL, START_S, batches, beyond, parts_of, qwen3, trained, use, without_times

from sparring.cluster.rank_process import RankEnded, RankProcess
from sparring.cluster.ranks import RankTrainer
from sparring.cluster.trainer import TrainerParts
from sparring.errors import BadInput, OtherRankFailed, TrainerError
from sparring.generation import ScoreRequest
from sparring.protocols import Trainer
from sparring.testing.rank_threads import RankThread
from sparring.train.gloo import GlooRanks
from sparring.types import CheckpointRef
from sparring.weights.shared_memory import FOLDER, PREFIX

__all__ = ["qwen3"]
LOST, LATER, FAILS = "lost in it", "lost after it", "short of memory"
Fate = tuple[str, str]
"""What becomes of a rank, and in which call."""


class FatedRank(RankThread):
    """A rank on a thread that meets the next of its fates when it is called so; those of all ranks that follow it too.

    Args:
        fates: in their order; one that is met is removed.
    """

    def __init__(self, fates: list[Fate]) -> None:
        super().__init__()
        self._fates = fates

    def call(self, method: str, data: bytes) -> bytes:
        fate = self._fates.pop(0)[0] if self._fates and self._fates[0][1] == method else ""
        if fate == FAILS:
            raise TrainerError(f"trainer: {method}: MemoryError")
        answer = b"" if fate == LOST else super().call(method, data)
        if fate:
            raise RankEnded(f"{fate}: {method}")
        return answer


def fated(parts: TrainerParts, *fates: Fate) -> tuple[Trainer, list[Fate]]:
    """A trainer of one rank, as none that is a thread can be killed while it waits for another; and the fates left."""
    left = list(fates)
    return RankTrainer(parts, lambda: [FatedRank(left)], START_S), left


async def every_call(trainer: Trainer, folder: Path) -> list[Any]:
    """What is seen of every call of a trainer, with a checkpoint that the last ones go on from."""
    first, second, third = batches()
    seen: list[Any] = [without_times(await trainer.forward_backward(first)), (await trainer.step()).version]
    ref = await trainer.save(str(folder), stage="rl", metrics={"reward": 0.5})
    seen += [ref.step, without_times(await trainer.forward_backward(second)), (await trainer.step()).version]
    seen.append(await trainer.score("first", ScoreRequest(id="s", tokens=(3, 1, 4, 1), first=1, top_k=2)))
    seen.append(await trainer.forward(first.rows, {"logprob"}))
    seen.append((await trainer.push()).digests)
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*")), "a rank that is killed would leave the file"
    await trainer.restore(ref)
    seen += [trainer.version, without_times(await trainer.forward_backward(third)), (await trainer.step()).version]
    return [*seen, (await trainer.push()).digests]


@FULL
@pytest.mark.parametrize("method", ["forward_backward", "step", "save", "score", "forward", "push", "restore"])
def test_a_rank_may_be_lost_in_any_call_and_after_it(method: str, qwen3: Path, tmp_path: Path) -> None:
    parts = parts_of(qwen3, teachers={"first": None})
    expected = use(parts.trainer(), lambda trainer: every_call(trainer, tmp_path / "own"))
    trainer, left = fated(parts, (LOST, method), (LATER, method))
    assert use(trainer, lambda trainer: every_call(trainer, tmp_path / "lost")) == expected and not left


def changed(work: Callable[[Trainer, Path], Any], qwen3: Path, tmp_path: Path, *fates: Fate) -> Any:
    """The weights after some work, with fates and without."""
    parts = parts_of(qwen3)
    trainer, left = fated(parts, *fates)
    found = use(trainer, lambda trainer: work(trainer, tmp_path / "lost"))
    assert not left
    assert found == use(parts.trainer(), lambda trainer: work(trainer, tmp_path / "own"))


@FULL
def test_gradients_that_were_not_applied_when_it_was_saved_are_there_again(qwen3: Path, tmp_path: Path) -> None:
    async def work(trainer: Trainer, folder: Path) -> Any:
        first, second, third = batches()
        await trainer.forward_backward(first)
        await trainer.step()
        await trainer.forward_backward(second)
        await trainer.save(str(folder), stage="rl", metrics={})
        await trainer.forward_backward(third)
        return without_times((await trainer.step()).metrics), (await trainer.push()).checksum

    changed(work, qwen3, tmp_path, (LOST, "step"), (LATER, "push"))


def test_a_call_that_failed_for_lack_of_memory_is_not_made_again(qwen3: Path, tmp_path: Path) -> None:
    async def work(trainer: Trainer, folder: Path) -> Any:
        batch, own = batches(1)[0], not isinstance(trainer, RankTrainer)
        if not own:
            with pytest.raises(TrainerError, match="MemoryError"):
                await trainer.forward_backward(batch)
        await trainer.forward_backward(batch)
        await trainer.step()
        return (await trainer.push()).checksum

    changed(work, qwen3, tmp_path, (FAILS, "forward_backward"), (LOST, "push"))


@FULL
def test_a_step_that_cannot_be_trained_again_is_told_and_tried_again(qwen3: Path, tmp_path: Path) -> None:
    async def work(trainer: Trainer, folder: Path) -> Any:
        await trainer.forward_backward(batches(1)[0])
        await trainer.step()
        if isinstance(trainer, RankTrainer):
            with pytest.raises(TrainerError, match="MemoryError"):
                await trainer.push()
        return (await trainer.push()).checksum

    changed(work, qwen3, tmp_path, (LOST, "push"), (FAILS, "forward_backward"))


@FULL
def test_ranks_without_their_checkpoint_do_not_go_on_without_it(qwen3: Path, tmp_path: Path) -> None:
    async def work(trainer: Trainer, folder: Path) -> Any:
        await trainer.forward_backward(batches(1)[0])
        await trainer.step()
        ref: CheckpointRef = await trainer.save(str(folder), stage="rl", metrics={})
        if isinstance(trainer, RankTrainer):
            folder.rename(folder.with_name("away"))
            for _ in range(2):
                with pytest.raises(BadInput) as error:
                    await trainer.push()
                assert ref.path in error.value.where
            folder.with_name("away").rename(folder)
        return (await trainer.push()).checksum

    changed(work, qwen3, tmp_path, (LOST, "push"))


@FULL
def test_a_checkpoint_that_one_rank_cannot_read_changes_no_rank(qwen3: Path, tmp_path: Path) -> None:
    parts = parts_of(qwen3)
    ref = use(parts.trainer(), lambda trainer: trainer.save(str(tmp_path / "step"), stage="rl", metrics={}))
    loading = Lock()

    def restored(rank: int) -> int:
        ranks = GlooRanks(rank, 2, tmp_path / "meeting", START_S)
        with loading:
            trainer = parts.trainer(ranks)

        async def work(trainer: Trainer) -> int:
            await trainer.step()
            with pytest.raises(BadInput if rank else OtherRankFailed):
                await trainer.restore(replace(ref, path=ref.path + "-gone") if rank else ref)
            return trainer.version

        return int(use(trainer, work))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(restored, range(2))) == [1, 1]


@FULL
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stands still"])
@pytest.mark.parametrize("saved", [True, False], ids=["after a checkpoint", "without one"])
def test_a_rank_that_is_lost_is_replaced_and_changes_no_bit(
    how: signal.Signals, saved: bool, qwen3: Path, tmp_path: Path
) -> None:
    """It is lost between two calls; the steps since the checkpoint are trained again, a failed batch among them."""
    parts, given, made = parts_of(qwen3), batches(4), list[RankProcess]()

    def make() -> list[RankProcess]:
        made[:] = [RankProcess(rank, silent_s=4.0) for rank in range(2)]
        return made

    async def work(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for batch in given[:3]:
            seen.append(without_times(await trainer.forward_backward(batch)))
            seen.append(without_times((await trainer.step()).metrics))
            if saved and batch.step == 1:
                await trainer.save(str(tmp_path / f"step-{len(made)}"), stage="rl", metrics={})
        with pytest.raises(BadInput):
            await trainer.forward_backward(replace(given[0], rows=(beyond(given[0].rows[0]),)))
        seen.append((await trainer.push()).checksum)
        if made:
            os.kill(made[1].pid, how)
        return [*seen, *await trained(trainer, given[3:])]

    expected = use(parts.trainer(), work)
    first = use(RankTrainer(parts, make, START_S), work)
    assert first == expected
    check_gone(made)


def check_gone(ranks: list[RankProcess]) -> None:
    assert not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks)


@FULL
def test_a_rank_that_ends_whenever_it_is_called_ends_the_trainer(qwen3: Path) -> None:
    made = list[RankProcess]()

    def make() -> list[RankProcess]:
        made.append(RankProcess(0))
        return made[-1:]

    async def work(trainer: Trainer) -> None:
        made[-1].kill()
        parts.models.clear()  # nothing can be loaded any more
        with pytest.raises(TrainerError):
            await trainer.push()

    parts = parts_of(qwen3)
    use(RankTrainer(parts, make, START_S), work)
    check_gone(made)
