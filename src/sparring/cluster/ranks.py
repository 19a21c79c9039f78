"""`RankTrainer`: a trainer whose ranks are processes. Its results have the bits of one process, whatever their
number."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sparring.cluster.call_log import BACKWARD, STEP, UnsavedCalls
from sparring.cluster.nodes import NODE, check_sees, compare, paths_to_see
from sparring.cluster.rank import ForwardCall, Opened, PushCall, RankEnded, RankFailure, RankPlan, SaveCall, ScoreCall
from sparring.cluster.startup import starting
from sparring.cluster.trainer import TrainerParts
from sparring.errors import OtherRankFailed, SparringError, TrainerError, WeightsError, refusal
from sparring.generation import ScoreRequest, Scores
from sparring.log import Report, log_event
from sparring.store.codec import decode, encode
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef

T = TypeVar("T")
WAIT_S = 1800.0
"""Seconds that a rank waits for another rank in a call."""
ATTEMPTS = 4
"""Number of attempts to make a call while ranks end."""
GRACE_S = 30.0
"""Seconds that the other ranks have to end a call that failed in one."""


class RankCalls(Protocol):
    """Rank of a trainer, wherever it runs."""

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        """Call a method of the rank, as `Rank.call`. Blocks; one call at a time. Raises RankEnded if the rank's process
        has ended, or gives no sign of life."""

    def kill(self) -> None:
        """Kill the process. Calls in progress end with an error."""

    def close(self) -> None:
        """End the process. Safe to call twice."""


class RankTrainer:
    """Trainer whose ranks are processes. Implements `Trainer`.

    Every call goes to all ranks, in one order; a call that needs no shards goes to one rank only. A batch is encoded
    once. If a rank ends or hangs, all ranks are replaced, by fewer ranks if need be. The new ranks restore the last
    checkpoint and make all later calls again, which gives the same bits (design 9).

    Args:
        make: function that makes the given number of ranks, one after the other, without starting them. When they
            replace other ranks, they may be fewer if there is no room for more.
        start_timeout_s: time limit for all ranks to load the model and to find each other, in seconds.
        shared: folder that all ranks see, for weights of a rank on another machine; None if all ranks are here.
        report: called when ranks start, are lost, or are restarted.
        nodes: number of nodes of the Ray cluster that has the ranks; 0 if they are on this machine.

    Raises:
        BadInput: a folder has no checkpoint that can be loaded, or another checkpoint for some ranks; or a loss is not
            supported.
        TrainerError: a rank did not start in time.
    """

    def __init__(
        self,
        parts: TrainerParts,
        make: Callable[[int], Iterable[RankCalls]],
        count: int,
        start_timeout_s: float,
        shared: Path | None = None,
        report: Report = log_event,
        nodes: int = 0,
    ) -> None:
        self._tell, self._nodes, self._hosts = report, nodes, dict[int | None, str]()
        self._parts, self._make, self._count, self._start_timeout_s = parts, make, count, start_timeout_s
        self._version = self._asked = 0
        self._closed, self._complete = False, True  # complete: the ranks have all that was trained
        self._shared, self._by_folder = shared, False
        self._unsaved = UnsavedCalls()
        self._ranks: list[RankCalls] = []
        # calls in their order; ranks end with the thread that makes them
        self._worker = ThreadPoolExecutor(1, "ranks")
        try:
            self._worker.submit(self._start, count).result()
        except BaseException:
            self._closed = True
            for rank in list(self._ranks):
                rank.kill()
            self._close()
            raise

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
        asked = self._asked

        def score() -> bytes:
            return _answer(self._ranks[asked % len(self._ranks)], "score", encode(ScoreCall(teacher, request)))

        return decode(await self._in_worker(score), Scores)

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        kind: Any = dict[str, int | float]
        metrics: dict[str, float] = (await self._kept(BACKWARD, batch, kind))[0]
        return metrics

    async def step(self, *, ends_update: bool = True) -> StepResult:
        result, *others = await self._kept(STEP, ends_update, StepResult)
        self._version = result.version
        of_ranks = {name: value for other in others for name, value in other.metrics.items() if "rank/" in name}
        return replace(result, metrics={**result.metrics, **of_ranks})

    async def push(self) -> WeightRef:
        return await self._in_worker(self._fetch)

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        call = SaveCall(path, stage, dict(metrics))
        return await self._all("save", call, CheckpointRef, then=self._unsaved.saved)

    async def restore(self, ref: CheckpointRef) -> None:
        self._version = await self._all("restore", ref, int, then=lambda _: self._unsaved.restored(ref))

    async def close(self) -> None:
        """Finish pending calls and end the processes. Can be called twice."""
        await asyncio.to_thread(self._close)

    async def _all(
        self, method: str, argument: object, kind: type[T], then: Callable[[T], None] = lambda answer: None
    ) -> T:
        """Call a method of all ranks; return the answer of rank 0. `then` gets this answer before any further call."""

        def call() -> T:
            answer = decode(_call(self._ranks, method, [encode(argument)] * len(self._ranks))[0], kind)
            then(answer)
            return answer

        return await self._in_worker(call)

    async def _kept(self, method: str, argument: object, kind: type[T]) -> list[T]:
        """Call a method that changes all ranks, and keep the call in the log of unsaved calls. Return the answers of
        all ranks."""

        def call() -> list[T]:
            data = encode(argument)
            kept = self._unsaved.write(method, data)
            try:
                answers = [decode(each, kind) for each in _call(self._ranks, method, [data] * len(self._ranks))]
            except RankEnded:
                raise
            except SparringError:  # in all ranks
                self._unsaved.failed(kept)
                raise
            self._unsaved.add(kept)
            return answers

        return await self._in_worker(call)

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._recovering, work)

    def _recovering(self, work: Callable[[], T]) -> T:
        """Run `work` on the ranks. If a rank ends meanwhile, replace all ranks and run `work` again. If a new rank ends
        too, try half as many ranks next, since there may be no memory for more. Raises RankEnded if a rank ended in
        each of `ATTEMPTS` attempts, or the trainer was closed. Raises SparringError if the work failed in one rank
        only, and then in the same way in a rank that replaced it."""
        count, failure = self._count, ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if not self._complete:
                    self._replace(count)
                return work()
            except RankEnded as error:
                self._complete, cause = False, error.__cause__
                if isinstance(cause, SparringError):
                    if failure == repr(cause):
                        raise cause from None
                    failure = repr(cause)
                if attempt == ATTEMPTS or self._closed:
                    raise
                reason = str(error).partition("; the end of its log:")[0]
                self._report(reason, "rank lost", rank=error.rank, node=self._hosts.get(error.rank), reason=reason)
                if attempt > 1:
                    count = max(1, count // 2)
        raise AssertionError("the last attempt returns or raises")

    def _replace(self, count: int) -> None:
        """Start `count` new ranks, and bring them to the state of the lost ranks. On failure the next call tries
        again."""
        _end(self._ranks)
        self._start(count)
        if self._unsaved.base is not None:
            _call(self._ranks, "restore", [encode(self._unsaved.base)] * len(self._ranks))
        has = f"the trainer has ranks: {len(self._ranks)}, of {self._count}"
        self._report(f"{has}; its ranks are started again and train {self._unsaved.steps} steps again", "ranks back")
        for call, data in self._unsaved:
            if self._closed:
                raise RankEnded("the trainer was closed before its ranks were replaced")
            try:
                _call(self._ranks, call.method, [data] * len(self._ranks))
            except SparringError as error:
                if not call.failed or isinstance(error, RankEnded):
                    raise
        self._complete = True

    def _report(self, text: str, kind: str, **facts: int | str | None) -> None:
        self._tell(text, {"kind": kind, "model": self._parts.name, "at_step": self._version, **facts})

    def _fetch(self) -> WeightRef:
        """Let rank 0 publish the weights, with shards from the other ranks, and copy them into this process, where the
        copy outlasts the next publication. The weights travel by shared memory, or by the shared folder if rank 0 is on
        another machine."""
        from sparring.weights import disk, shared_memory

        if not self._by_folder:
            ref = self._published("")
            try:
                state = shared_memory.fetch(ref)
            except WeightsError:
                if self._shared is None:
                    raise
                self._by_folder = True
            else:
                shared_memory.forget(ref)  # a rank that is killed could not remove the file
                return replace(ref, transport="inline", location=state)
        ref = self._published(str(self._shared))
        try:
            return replace(ref, transport="inline", location=disk.fetch(ref))
        finally:
            disk.forget(ref)

    def _published(self, folder: str) -> WeightRef:
        """Let rank 0 publish the weights, and return the reference. All ranks take part if they hold the parameters in
        shards."""
        asked = self._ranks if self._parts.sharded else self._ranks[:1]
        return decode(_call(asked, "push", [encode(PushCall(folder))] * len(asked))[0], WeightRef)

    def _start(self, count: int) -> None:
        """Make ranks, let them find each other, and load the models."""
        self._ranks, self._by_folder = [], False
        with starting("rank", count, self._tell, self._nodes) as ready, ExitStack() as failed:
            failed.callback(_end, self._ranks)
            for rank in self._make(count):
                self._ranks.append(rank)
                if self._closed:
                    raise RankEnded("the trainer was closed before its ranks were started")
            ranks, within_s = self._ranks, self._start_timeout_s
            with paths_to_see(self._shared) as paths:
                answers = _call(ranks, "open", [encode(list(paths))] * len(ranks), within_s)
            opened = [decode(answer, Opened) for answer in answers]
            self._hosts = {rank: each.computes[NODE] for rank, each in enumerate(opened)}
            for each in opened if paths else ():
                compare(each.computes)
                check_sees(each.computes[NODE], each.seen, paths)
            meeting = opened[0].meeting
            plan = RankPlan(parts=self._parts, rank=0, count=len(ranks), meeting=meeting, timeout_s=WAIT_S)
            _call(ranks, "join", [pickle.dumps(replace(plan, rank=rank)) for rank in range(len(ranks))], within_s)
            loaded = _call(ranks, "load", [b""] * len(ranks), within_s, lambda rank: ready(rank, self._hosts[rank]))
            _check_models([decode(checksums, dict[str, str]) for checksums in loaded])
            failed.pop_all()

    def _close(self) -> None:
        self._closed = True  # a rank that ends now is not replaced
        with suppress(RuntimeError):  # it was closed before
            self._worker.submit(self._close_ranks)
        self._worker.shutdown()
        self._unsaved.close()

    def _close_ranks(self) -> None:
        for rank in self._ranks:
            rank.close()


def _check_models(loaded: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that have loaded other models than rank 0: their checksums differ."""
    for rank, checksums in enumerate(loaded):
        for name, checksum in checksums.items():
            if checksum != (expected := loaded[0][name]):
                where, advice = f"rank {rank} of the trainer: model {name}", "give all nodes the same files"
                raise refusal(where, f"the weights of rank 0, {expected}", checksum, advice)


def _end(ranks: Sequence[RankCalls]) -> None:
    for rank in ranks:
        rank.kill()  # all, before one is waited for
    for rank in ranks:
        rank.close()


def _answer(rank: RankCalls, method: str, data: bytes) -> bytes:
    failure, answer = rank.call(method, data)
    if failure:
        raise decode(failure, RankFailure).error()
    return answer


def _call(
    ranks: Sequence[RankCalls],
    method: str,
    data: Sequence[bytes],
    timeout_s: float | None = None,
    done_by: Callable[[int], None] = lambda rank: None,
) -> list[bytes]:
    """Call a method of all ranks, each with its data, and return their answers. `done_by` is called, in any thread,
    with the number of each rank that has answered. If a rank ends, the others are killed, because they wait for it.

    Raises:
        RankEnded: a rank ended, or the call failed in one rank while other ranks waited for it.
        TrainerError: a rank did not answer in time.
        SparringError: the call failed in all ranks.
    """

    def one(rank: int) -> bytes:
        answer = _answer(ranks[rank], method, data[rank])
        done_by(rank)
        return answer

    with ThreadPoolExecutor(len(ranks), "rank") as callers:
        calls = [callers.submit(one, rank) for rank in range(len(ranks))]
        done, late = wait(calls, timeout_s, "FIRST_EXCEPTION")
        failed = any(call.exception() for call in done)
        if late and failed and not any(isinstance(call.exception(), RankEnded) for call in done):
            done, late = wait(calls, GRACE_S)
        if late:
            for rank in ranks:
                rank.kill()
    if late and not failed:
        raise TrainerError(f"trainer: expected {method} within {timeout_s:g} s, got no answer of {len(late)} ranks")
    errors = [error for call in calls if call in done and (error := call.exception()) is not None]
    for number, call in enumerate(calls):
        if call in done and isinstance(ended := call.exception(), RankEnded):
            ended.rank = number
            raise ended
    if errors:
        cause = min(errors, key=lambda error: isinstance(error, OtherRankFailed))
        if late:
            raise RankEnded(f"{cause}; the other ranks waited for this one") from cause
        raise cause
    return [call.result() for call in calls]
