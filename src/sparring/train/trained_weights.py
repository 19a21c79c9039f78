"""How a trainer holds the weights that it trains: whole, or (`sharded_weights`) in shards.

What reads all weights, to publish or to save them, asks for one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

from sparring.model.causal import CausalModel
from sparring.model.lora import Adapter
from sparring.train.non_finite import check_finite
from sparring.train.optimiser import Optimiser
from sparring.train.parts import Parts
from sparring.train.ranks import Ranks, deal
from sparring.types import WeightRef
from sparring.weights.inline import Probe, publish

Item = TypeVar("Item")
Result = TypeVar("Result")


class TrainedWeights(Protocol):
    """Weights of a trainer, in this process, and the computation of a batch's parts."""

    parts: Parts

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes without gradients. All ranks enter it together."""
        ...

    def deal(self, items: Sequence[Item], compute: Callable[[Item], Result], kind: type[Result]) -> list[Result]:
        """Compute each item without gradients in one rank, item i in rank i modulo their number; return the results of
        all items. If one fails in another rank, this raises `OtherRankFailed`."""
        ...

    def update(self) -> None:
        """Bring the masters of the last step to the weights."""
        ...

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the trained weights by name, for their names, dtypes and shapes; their values are not to be read."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight and its name, in the order of `state`. All ranks call this together and read all; the next
        tensor may overwrite the one before."""
        ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the weights from `state`, after the optimiser has taken its own; refuse other names or shapes
        (`WeightsError`)."""
        ...

    def check_finite(self, name: str, version: int) -> None:
        """Refuse weights that are infinite or not a number, here (`NotFinite`) or in another rank
        (`OtherRankFailed`)."""
        ...

    def publish(self, name: str, version: int, probe: Probe | None, *, adapter: str | None) -> WeightRef:
        """Publish a copy of the weights, with the arguments of `weights.inline.publish`. The publication before may
        end."""
        ...

    def close(self) -> None:
        """End what is published. May be called from another thread, and twice."""
        ...


class WholeWeights:
    """Weights that every rank has whole. Implements `TrainedWeights`."""

    def __init__(self, trained: CausalModel | Adapter, optimiser: Optimiser, parts: Parts, ranks: Ranks) -> None:
        self._trained, self._optimiser, self.parts, self._ranks = trained, optimiser, parts, ranks

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def deal(self, items: Sequence[Item], compute: Callable[[Item], Result], kind: type[Result]) -> list[Result]:
        return deal(self._ranks, items, compute, kind)

    def update(self) -> None:
        self._optimiser.write_back()
        self._trained.refresh()

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._trained.state()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._trained.state().items()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._trained.load_state(state)

    def check_finite(self, name: str, version: int) -> None:
        check_finite(self._trained.state(), name, version)

    def publish(self, name: str, version: int, probe: Probe | None, *, adapter: str | None) -> WeightRef:
        return publish(name, version, self._trained.state(), probe, adapter=adapter)

    def close(self) -> None:
        """Do nothing: what was published is a copy in memory."""


def drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Read the rest of `TrainedWeights.tensors`, after an error too, because the other ranks gather it."""
    for _ in tensors:
        pass
