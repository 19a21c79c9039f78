"""Calls of a trainer as bytes, and their execution in a rank's process, by whatever transport they come."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sparring import errors
from sparring.cluster.nodes import enter_folder, what_computes
from sparring.cluster.trainer import TrainerParts
from sparring.errors import BadInput, SparringError, TrainerError, boundary
from sparring.generation import ScoreRequest
from sparring.store.codec import decode, encode
from sparring.types import Batch, CheckpointRef, Sample, WeightRef

if TYPE_CHECKING:
    from sparring.train.gloo import GlooRanks, Meeting
    from sparring.train.trainer import LocalTrainer

T = TypeVar("T")


class RankEnded(TrainerError):
    """Error: the process of rank `rank` has ended, or gives no sign of life, in a call or before the call."""

    rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """Plan with which rank `rank` of `count` ranks, from 0, is started. It is pickled, because losses are objects.

    Attributes:
        meeting: address of the store by which the ranks find each other; one of the ranks has the store.
        timeout_s: seconds that a rank waits for another.
    """

    parts: TrainerParts
    rank: int
    count: int
    meeting: str
    timeout_s: float


class Opened(msgspec.Struct, frozen=True):
    """Answer of the call `open`: `what_computes` of the rank's process, the paths that exist there and, from the first
    rank, the address of the store by which ranks find each other."""

    computes: dict[str, str]
    seen: list[str]
    meeting: str


class ForwardCall(msgspec.Struct, frozen=True):
    """Arguments of `Trainer.forward`."""

    rows: tuple[Sample, ...]
    needs: tuple[str, ...]


class ScoreCall(msgspec.Struct, frozen=True):
    """Arguments of `Trainer.score`."""

    teacher: str
    request: ScoreRequest


class SaveCall(msgspec.Struct, frozen=True):
    """Arguments of `Trainer.save`."""

    path: str
    stage: str
    metrics: dict[str, float]


class PushCall(msgspec.Struct, frozen=True):
    """Arguments of `Trainer.push`. `folder`: folder for the weights that the caller sees too; "" publishes in shared
    memory, for a caller on this machine."""

    folder: str = ""


class RankFailure(msgspec.Struct, frozen=True):
    """Error of a call as plain data: name of the error's class, message, `BadInput.where`, and the errno of the OSError
    that caused the error, such as of a full disk."""

    kind: str
    message: str
    where: str = ""
    errno: int = 0

    @staticmethod
    def of(error: SparringError) -> RankFailure:
        """Return the plain form of an error."""
        where, cause = error.where if isinstance(error, BadInput) else "", error.__cause__
        number = errno.ENOMEM if isinstance(cause, MemoryError) else getattr(cause, "errno", None)
        return RankFailure(type(error).__name__, str(error), where, number or 0)

    def error(self) -> SparringError:
        """Return the error with its cause. Classes that are not in `sparring.errors` become `TrainerError`."""
        kind = getattr(errors, self.kind, TrainerError)
        error: SparringError = BadInput(self.message, self.where) if kind is BadInput else kind(self.message)
        if self.errno:
            lacks_memory = self.errno == errno.ENOMEM
            error.__cause__ = MemoryError() if lacks_memory else OSError(self.errno, os.strerror(self.errno))
        return error


class Rank:
    """Rank of a trainer: calls and answers are bytes. For one thread. Other ranks reach its machine at `host`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._meeting: Meeting | None = None
        self._loop = asyncio.new_event_loop()
        self._parts: TrainerParts | None = None
        self._ranks: GlooRanks | None = None
        self._trainer: LocalTrainer | None = None
        self._published = ExitStack()
        self._calls: dict[str, Callable[[bytes], bytes]] = {
            "open": self._open,
            "join": self._join,
            "load": self._load,
            "forward": self._forward,
            "score": self._score,
            "forward_backward": self._forward_backward,
            "step": self._step,
            "push": self._push,
            "save": self._save,
            "restore": self._restore,
        }

    def call(self, method: str, data: bytes) -> tuple[bytes, bytes]:
        """Call a method of the trainer. The first calls are `open`, with the paths that this rank must see, `join`,
        which connects the rank with the others, and `load`, which makes the trainer and returns the checksums of its
        models.

        Returns:
            An encoded `RankFailure`, empty without an error, and the encoded answer.
        """
        try:
            with boundary(TrainerError, f"trainer: {method}"):
                return b"", self._calls[method](data)
        except SparringError as error:
            traceback.print_exc(file=sys.stderr)
            return encode(RankFailure.of(error)), b""

    def close(self) -> None:
        """End the trainer's threads, and remove published weights."""
        if self._trainer is not None and not self._loop.is_closed():
            self._wait(self._trainer.close())
        self._loop.close()
        self.release()

    def release(self) -> None:
        """Remove the weights that are still published. May be called from another thread."""
        self._published.close()
        if self._trainer is not None:
            self._trainer.release()

    def _open(self, data: bytes) -> bytes:
        from sparring.train.gloo import Meeting

        seen, self._meeting = enter_folder(decode(data, list[str])), Meeting(self._host)
        return encode(Opened(what_computes(), seen, self._meeting.address))

    def _join(self, data: bytes) -> bytes:
        from sparring.train.gloo import GlooRanks

        plan: RankPlan = pickle.loads(data)
        self._ranks = GlooRanks(plan.rank, plan.count, plan.meeting, plan.timeout_s, self._host)
        self._parts = plan.parts
        return b""

    def _load(self, data: bytes) -> bytes:
        assert self._parts is not None, "join comes before it"
        self._trainer = self._parts.trainer(self._ranks)
        return encode(self._trainer.checksums())

    def _forward(self, data: bytes) -> bytes:
        call = decode(data, ForwardCall)
        return encode(self._wait(self._own.forward(call.rows, frozenset(call.needs))))

    def _score(self, data: bytes) -> bytes:
        call = decode(data, ScoreCall)
        return encode(self._wait(self._own.score(call.teacher, call.request)))

    def _forward_backward(self, data: bytes) -> bytes:
        return encode(self._wait(self._own.forward_backward(decode(data, Batch))))

    def _step(self, data: bytes) -> bytes:
        """Make an optimiser step. Its metrics include the time that this rank has waited for other ranks since the
        previous step."""
        assert self._ranks is not None, "join comes before it"
        result = self._wait(self._own.step(ends_update=decode(data, bool)))
        waited_s, self._ranks.waited_s = self._ranks.waited_s, 0.0
        return encode(replace(result, metrics={**result.metrics, f"rank/{self._ranks.rank}/sum_wait_s": waited_s}))

    def _push(self, data: bytes) -> bytes:
        """Publish the weights in place of the previous ones: in a folder or in shared memory. Parameters in shards are
        always published in shared memory first."""
        from sparring.weights import shared_memory
        from sparring.weights.disk import Disk

        folder = decode(data, PushCall).folder
        self._published.close()
        ref: WeightRef = self._wait(self._own.push())
        if folder and ref.transport != "inline" and self._ranks is not None and self._ranks.rank == 0:
            ref = replace(ref, transport="inline", location=shared_memory.fetch(ref))
        if ref.transport == "inline":
            link = Disk(Path(folder), "the run's folder") if folder else shared_memory.SharedMemory()
            self._published.callback(link.close)
            ref = self._published.enter_context(link.published(ref))
        return encode(ref)

    def _save(self, data: bytes) -> bytes:
        call = decode(data, SaveCall)
        return encode(self._wait(self._own.save(call.path, stage=call.stage, metrics=call.metrics)))

    def _restore(self, data: bytes) -> bytes:
        self._wait(self._own.restore(decode(data, CheckpointRef)))
        return encode(self._own.version)

    @property
    def _own(self) -> LocalTrainer:
        assert self._trainer is not None, "load comes before it"
        return self._trainer

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)
