"""`RankTrainer`: a trainer whose ranks are processes. It has the bits of one process, whatever their number."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sparring.cluster.rank import ForwardCall, RankPlan, SaveCall, ScoreCall
from sparring.cluster.rank_process import RankEnded
from sparring.cluster.trainer import TrainerParts
from sparring.errors import OtherRankFailed, SparringError, TrainerError
from sparring.generation import ScoreRequest, Scores
from sparring.store.codec import decode, encode
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef

T = TypeVar("T")
WAIT_S = 1800.0
"""Seconds that a rank waits for another in a call."""
GRACE_S = 30.0
"""Seconds that the other ranks have to end a call that failed in one."""


class RankCalls(Protocol):
    """Rank of a trainer, wherever it runs."""

    def call(self, method: str, data: bytes) -> bytes:
        """Call a method of the rank and return its answer. Blocks; one call at a time. Raises RankEnded."""

    def kill(self) -> None:
        """Kill the process. Calls in progress end with an error."""

    def close(self) -> None:
        """End the process. Safe to call twice."""


class RankTrainer:
    """Trainer whose ranks are processes. Implements `Trainer`.

    Every call goes to all ranks, in one order; what does not depend on their shards is asked of one rank. A batch is
    encoded once.

    Args:
        parts: parts of the trainer.
        ranks: ranks that were not started yet; they are closed with the trainer.
        start_timeout_s: time limit for all ranks to load the model and to find each other, in seconds.

    Raises:
        BadInput: a folder has no checkpoint that can be loaded, or a loss is not supported.
        TrainerError: a rank did not start in time.
    """

    def __init__(self, parts: TrainerParts, ranks: Sequence[RankCalls], start_timeout_s: float) -> None:
        self.ranks = ranks
        self._version = self._asked = 0
        self._worker = ThreadPoolExecutor(1, "ranks")  # calls in their order
        self._callers = ThreadPoolExecutor(len(ranks), "rank")
        with ExitStack() as failed:
            failed.callback(self._close)
            failed.callback(self._kill)
            self._start(parts, start_timeout_s)
            failed.pop_all()

    @property
    def version(self) -> int:
        return self._version

    async def forward(
        self, rows: Sequence[Sample], needs: Set[str] = frozenset({"logprob"})
    ) -> Sequence[Mapping[str, tuple[float, ...]]]:
        call = ForwardCall(tuple(rows), tuple(sorted(needs)))
        return await self._all("forward", call, list[dict[str, tuple[float, ...]]])

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        self._asked += 1
        return await self._one(self._asked % len(self.ranks), "score", ScoreCall(teacher, request), Scores)

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        kind: Any = dict[str, int | float]
        metrics: dict[str, float] = await self._all("forward_backward", batch, kind)
        return metrics

    async def step(self, *, ends_update: bool = True) -> StepResult:
        result = await self._all("step", ends_update, StepResult)
        self._version = result.version
        return result

    async def push(self) -> WeightRef:
        return await self._in_worker(self._fetch)

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        return await self._all("save", SaveCall(path, stage, dict(metrics)), CheckpointRef)

    async def restore(self, ref: CheckpointRef) -> None:
        self._version = await self._all("restore", ref, int)

    async def close(self) -> None:
        """Finish pending calls and end the processes. Can be called twice."""
        await asyncio.to_thread(self._close)

    async def _all(self, method: str, argument: object, kind: type[T]) -> T:
        """Call a method of all ranks; return the answer of rank 0."""
        return await self._in_worker(lambda: decode(self._call([encode(argument)] * len(self.ranks), method)[0], kind))

    async def _one(self, rank: int, method: str, argument: object, kind: type[T]) -> T:
        return await self._in_worker(lambda: decode(self.ranks[rank].call(method, encode(argument)), kind))

    async def _in_worker(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _fetch(self) -> WeightRef:
        """Let rank 0 publish the weights, and map them into this process, where they stay when it publishes others."""
        from sparring.weights.shared_memory import fetch

        ref = decode(self.ranks[0].call("push", b""), WeightRef)
        return replace(ref, transport="inline", location=fetch(ref))

    def _start(self, parts: TrainerParts, timeout_s: float) -> None:
        with tempfile.TemporaryDirectory(prefix="sparring-ranks-") as folder:
            plans = [
                RankPlan(
                    parts=parts, rank=rank, count=len(self.ranks), meeting=Path(folder) / "ranks", timeout_s=WAIT_S
                )
                for rank in range(len(self.ranks))
            ]
            self._call([pickle.dumps(plan) for plan in plans], "join", timeout_s)
        self._call([b""] * len(plans), "load", timeout_s)

    def _call(self, data: Sequence[bytes], method: str, timeout_s: float | None = None) -> list[bytes]:
        """Call a method of all ranks, each with its data, and return their answers. If a rank ends, the others are
        killed, because they wait for it.

        Raises:
            TrainerError: a rank ended, or did not answer in time.
            SparringError: the call failed.
        """
        calls = [self._callers.submit(rank.call, method, each) for rank, each in zip(self.ranks, data, strict=True)]
        done, late = wait(calls, timeout_s, "FIRST_EXCEPTION")
        if late and not any(call.exception() for call in done):
            self._kill()
            raise TrainerError(f"trainer: expected {method} within {timeout_s:g} s, got no answer of {len(late)} ranks")
        if wait(late, GRACE_S).not_done:
            self._kill()
        failures = list[SparringError]()
        for call in as_completed(calls):
            error = call.exception()
            if isinstance(error, RankEnded):
                self._kill()
            if isinstance(error, SparringError):
                failures.append(error)
        if failures:
            raise min(failures, key=lambda error: isinstance(error, OtherRankFailed))
        return [call.result() for call in calls]

    def _kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def _close(self) -> None:
        self._worker.shutdown()
        self._callers.shutdown()
        for rank in self.ranks:
            rank.close()
