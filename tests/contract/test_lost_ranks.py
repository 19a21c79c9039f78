"""A trainer whose ranks are lost, wherever it happens, has the bits of one whose ranks are not."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from rank_threads import RankThread
from safetensors.torch import load_file, save_file
from test_trainer import FULL, START_S, batches, beyond, parts_of, qwen3, trained, use, without_times

from sparring.cluster.rank import RankEnded
from sparring.cluster.rank_process import RankProcess
from sparring.cluster.ranks import RankTrainer
from sparring.cluster.trainer import TrainerParts
from sparring.errors import BadInput, OtherRankFailed, TrainerError
from sparring.generation import ScoreRequest
from sparring.log import Report, log_event
from sparring.protocols import Trainer
from sparring.train.gloo import GlooRanks, Meeting
from sparring.types import CheckpointRef
from sparring.weights.shared_memory import FOLDER, PREFIX

__all__ = ["qwen3"]
LOST, LATER, FAILS, ALONE = "lost in it", "lost after it", "short of memory", "others wait"
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

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        fate = self._fates.pop(0)[0] if self._fates and self._fates[0][1] == method else ""
        if fate == FAILS:
            raise TrainerError(f"trainer: {method}: MemoryError")
        if fate == ALONE:
            raise RankEnded("the other ranks waited for this one") from TrainerError(f"trainer: {method}: no such file")
        answer = (b"", b"") if fate == LOST else super().call(method, data)
        if fate:
            raise RankEnded(f"{fate}: {method}")
        return answer


def fated(parts: TrainerParts, *fates: Fate, report: Report = log_event) -> tuple[Trainer, list[Fate]]:
    """A trainer of one rank, as none that is a thread can be killed while it waits for another; and the fates left."""
    left = list(fates)
    return RankTrainer(parts, lambda count: [FatedRank(left)], 1, START_S, report=report), left


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


def test_what_fails_in_one_rank_again_is_raised_and_the_next_call_finds_ranks(qwen3: Path) -> None:
    """It is tried once more, because it may have been chance, and no further. Each loss and each start is told."""
    told = list[tuple[str, Any]]()

    def report(text: str, facts: Mapping[str, Any]) -> None:
        told.append((facts["kind"], facts.get("rank")))

    trainer, left = fated(parts_of(qwen3), (ALONE, "push"), (ALONE, "push"), report=report)

    async def work(trainer: Trainer) -> str:
        with pytest.raises(TrainerError, match="no such file") as error:
            await trainer.push()
        assert not isinstance(error.value, RankEnded) and not left
        return (await trainer.push()).checksum

    assert use(trainer, work)
    start = [("rank starts", None), ("rank starts", 0), ("rank starts", None)]
    assert told == [*start, ("rank lost", 0), *start, ("ranks back", None), *start, ("ranks back", None)]


@pytest.mark.full
def test_fewer_ranks_take_the_place_of_those_that_end_again(qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    counts, left = list[int](), [(LATER, "push"), (LOST, "push")]

    def make(count: int) -> list[FatedRank]:
        counts.append(count)
        return [FatedRank(left) for _ in range(count)]

    parts, given = parts_of(qwen3), batches(2)
    expected = use(parts.trainer(), lambda trainer: trained(trainer, given))
    assert use(RankTrainer(parts, make, 2, START_S), lambda trainer: trained(trainer, given)) == expected
    assert counts == [2, 2, 1] and "ranks: 1, of 2" in caplog.text


class StrangeRank(RankThread):
    """A rank that has another model than the first one.

    Args:
        folder: folder of its model.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        if method == "join":
            plan = pickle.loads(data)
            data = pickle.dumps(replace(plan, parts=replace(plan.parts, path=str(self._folder))))
        return super().call(method, data)


def test_a_rank_with_another_checkpoint_is_refused(qwen3: Path, tmp_path: Path) -> None:
    other = shutil.copytree(qwen3, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = max(weights)
    save_file({**weights, name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"})
    parts = parts_of(qwen3, teachers={"first": str(qwen3)})
    with pytest.raises(BadInput, match="give all nodes the same files") as error:
        RankTrainer(parts, lambda _: [RankThread(), StrangeRank(other)], 2, START_S)
    assert error.value.where == "rank 1 of the trainer: model policy"


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
    loading, meeting = Lock(), Meeting()

    def restored(rank: int) -> int:
        ranks = GlooRanks(rank, 2, meeting.address, START_S)
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
    parts, given, made, told = parts_of(qwen3), batches(4), list[RankProcess](), list[Any]()

    def make(count: int) -> list[RankProcess]:
        made[:] = [RankProcess(rank, silent_s=4.0) for rank in range(count)]
        return made

    async def work(trainer: Trainer) -> list[Any]:
        seen: list[Any] = []
        for batch in given[:3]:
            seen.append(without_times(await trainer.forward_backward(batch)))
            metrics = (await trainer.step()).metrics
            waits = {name: value for name, value in metrics.items() if "wait" in name}
            assert (
                list(waits) == [f"rank/{rank}/sum_wait_s" for rank in range(len(made))]
                and min(waits.values(), default=1) > 0
            )
            seen.append(without_times(metrics))
            if saved and batch.step == 1:
                await trainer.save(str(tmp_path / f"step-{len(made)}"), stage="rl", metrics={})
        with pytest.raises(BadInput):
            await trainer.forward_backward(replace(given[0], rows=(beyond(given[0].rows[0]),)))
        seen.append((await trainer.push()).checksum)
        if made:
            os.kill(made[1].pid, how)
        return [*seen, *await trained(trainer, given[3:])]

    expected = use(parts.trainer(), work)
    first = use(RankTrainer(parts, make, 2, START_S, report=lambda text, facts: told.append(facts)), work)
    assert first == expected
    [lost], [back] = ([facts for facts in told if facts["kind"] == kind] for kind in ("rank lost", "ranks back"))
    assert {**lost, "reason": ""} == {
        **back,
        "kind": "rank lost",
        "rank": 1,
        "node": socket.gethostname(),
        "reason": "",
    }
    assert lost["at_step"] == 3 and lost["model"] == "policy" and "rank 1 of the trainer" in lost["reason"]
    check_gone(made)


def check_gone(ranks: list[RankProcess]) -> None:
    assert not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks)


@FULL
def test_a_rank_that_ends_whenever_it_is_called_ends_the_trainer(qwen3: Path) -> None:
    made = list[RankProcess]()

    def make(count: int) -> list[RankProcess]:
        made.append(RankProcess(0))
        return made[-1:]

    async def work(trainer: Trainer) -> None:
        made[-1].kill()
        parts.models.clear()  # nothing can be loaded any more
        with pytest.raises(TrainerError):
            await trainer.push()

    parts = parts_of(qwen3)
    use(RankTrainer(parts, make, 1, START_S), work)
    check_gone(made)
