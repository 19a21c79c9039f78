"""Calls of a trainer as bytes: what a rank's process does with them, whatever carries them."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sparring import errors
from sparring.cluster.trainer import TrainerParts
from sparring.errors import BadInput, SparringError, TrainerError, boundary
from sparring.generation import ScoreRequest
from sparring.store.codec import decode, encode
from sparring.types import Batch, CheckpointRef, Sample

if TYPE_CHECKING:
    from sparring.train.ranks import Ranks
    from sparring.train.trainer import LocalTrainer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """Everything that a rank is started with; pickled, because losses are objects.

    Attributes:
        rank: number of the rank, from 0.
        count: number of ranks.
        meeting: file by which the ranks find each other.
        timeout_s: seconds that a rank waits for another.
    """

    parts: TrainerParts
    rank: int
    count: int
    meeting: Path
    timeout_s: float


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


class RankFailure(msgspec.Struct, frozen=True):
    """Error of a call as plain data: name of its class, message, `BadInput.where`, and the number of the system's error
    that caused it, such as of a full disk."""

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
    """One rank of a trainer: calls in, answers out, both as bytes. For one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._parts: TrainerParts | None = None
        self._ranks: Ranks | None = None
        self._trainer: LocalTrainer | None = None
        self._published = ExitStack()
        self._calls: dict[str, Callable[[bytes], bytes]] = {
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
        """Call a method of the trainer; first `join`, which finds the other ranks, and `load`, which makes the trainer.

        Returns:
            An encoded `RankFailure` or nothing, and the answer.
        """
        try:
            with boundary(TrainerError, f"trainer: {method}"):
                return b"", self._calls[method](data)
        except SparringError as error:
            traceback.print_exc(file=sys.stderr)
            return encode(RankFailure.of(error)), b""

    def close(self) -> None:
        """End the trainer's threads, and remove what is published."""
        if self._trainer is not None and not self._loop.is_closed():
            self._wait(self._trainer.close())
        self._loop.close()
        self.release()

    def release(self) -> None:
        """Remove the weights that are still published. May be called from another thread."""
        self._published.close()
        if self._trainer is not None:
            self._trainer.release()

    def _join(self, data: bytes) -> bytes:
        from sparring.train.gloo import GlooRanks

        plan: RankPlan = pickle.loads(data)
        self._parts, self._ranks = plan.parts, GlooRanks(plan.rank, plan.count, plan.meeting, plan.timeout_s)
        return b""

    def _load(self, data: bytes) -> bytes:
        assert self._parts is not None, "the first call is join"
        self._trainer = self._parts.trainer(self._ranks)
        return b""

    def _forward(self, data: bytes) -> bytes:
        call = decode(data, ForwardCall)
        return encode(self._wait(self._own.forward(call.rows, frozenset(call.needs))))

    def _score(self, data: bytes) -> bytes:
        call = decode(data, ScoreCall)
        return encode(self._wait(self._own.score(call.teacher, call.request)))

    def _forward_backward(self, data: bytes) -> bytes:
        return encode(self._wait(self._own.forward_backward(decode(data, Batch))))

    def _step(self, data: bytes) -> bytes:
        return encode(self._wait(self._own.step(ends_update=decode(data, bool))))

    def _push(self, data: bytes) -> bytes:
        """Publish the weights in shared memory, in place of those before, unless the trainer did."""
        from sparring.weights.shared_memory import published

        self._published.close()
        ref = self._wait(self._own.push())
        if ref.transport == "inline":
            ref = self._published.enter_context(published(ref))
        return encode(ref)

    def _save(self, data: bytes) -> bytes:
        call = decode(data, SaveCall)
        return encode(self._wait(self._own.save(call.path, stage=call.stage, metrics=call.metrics)))

    def _restore(self, data: bytes) -> bytes:
        self._wait(self._own.restore(decode(data, CheckpointRef)))
        return encode(self._own.version)

    @property
    def _own(self) -> LocalTrainer:
        assert self._trainer is not None, "the second call is load"
        return self._trainer

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)
