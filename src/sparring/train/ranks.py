"""Ranks: processes that train one model together, and their communication.

Every rank runs the same program on the same batch; only `rank` differs. A method of `Ranks` returns when every rank has
called it, so all ranks have to call the same methods in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import torch

from sparring.errors import OtherRankFailed, TrainerError

Item = TypeVar("Item")
Result = TypeVar("Result")
FAILED, DONE = b"\0", b"\1"
"""First byte of a rank's message to the others in `agree`: whether its work failed or succeeded."""


class OutOfStep(TrainerError):
    """Failure of this rank in the middle of an exchange: its next call of `Ranks` would not match the other ranks'."""


@contextmanager
def in_step(what: str) -> Iterator[None]:
    """Run the context's body together with the other ranks; a failure in it becomes `OutOfStep`."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            cause = sys.exc_info()[1]
            raise OutOfStep(f"{what}: expected it to be done, got {cause!r}; the ranks are replaced") from cause


class Ranks(Protocol):
    """Processes that train one model together: this one is number `rank`, from 0, of `count`. All methods raise
    TrainerError if a rank has ended, or did not answer in time."""

    rank: int
    count: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of the ranks."""
        ...

    def exchange(self, given: torch.Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send bytes to each rank: consecutive parts of `given`, uint8, of `lengths` bytes in the order of the ranks.
        Return the tensor that each rank sent to this rank, of `sizes` bytes."""
        ...

    def broadcast(self, data: torch.Tensor, owner: int) -> None:
        """Overwrite `data`, uint8 of equal size in all ranks, with the bytes of rank `owner`."""
        ...


class Alone:
    """One process. Implements `Ranks`."""

    rank, count = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def exchange(self, given: torch.Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        return [given]

    def broadcast(self, data: torch.Tensor, owner: int) -> None:
        """Do nothing: the only rank is the owner."""


ALONE = Alone()


class RankLayout(NamedTuple):
    """Layout of a trainer over `ranks`, each of which runs a `LocalTrainer`. If `sharded`, the ranks hold the
    parameters in shards (`sharded_parameters`)."""

    ranks: Ranks = ALONE
    sharded: bool = False


def agree(ranks: Ranks, work: Callable[[], bytes]) -> list[bytes]:
    """Run this rank's `work`, and return the results of all ranks. If the work fails in one rank, this call fails in
    all ranks, so that no rank waits for a failed one. Raises OtherRankFailed if the work failed in another rank. Raises
    OutOfStep if this rank failed in the middle of an exchange, for which the other ranks wait."""
    try:
        told = DONE + work()
    except OutOfStep:
        raise
    except BaseException:
        ranks.gather(FAILED)
        raise
    every = ranks.gather(told)
    for rank, each in enumerate(every):
        if each[:1] == FAILED:
            raise OtherRankFailed(f"rank {ranks.rank} of {ranks.count}: rank {rank} could not do its part")
    return [each[1:] for each in every]


def deal(ranks: Ranks, items: Sequence[Item], compute: Callable[[Item], Result], kind: type[Result]) -> list[Result]:
    """Compute each item in one rank, item i in rank i modulo the number of ranks. Return the results of all items; they
    travel between ranks encoded by msgspec, as type `kind`."""
    if ranks.count == 1:
        return [compute(item) for item in items]

    def own() -> bytes:
        return msgspec.msgpack.encode([compute(item) for item in items[ranks.rank :: ranks.count]])

    of_rank = [msgspec.msgpack.decode(data, type=list[msgspec.Raw]) for data in agree(ranks, own)]
    encoded = [of_rank[index % ranks.count][index // ranks.count] for index in range(len(items))]
    return [msgspec.msgpack.decode(each, type=kind) for each in encoded]
