"""Weights that a trainer trains: whole in every rank, or in shards (`sharded_weights`).

To publish or to save the weights, they are read one tensor after the other.
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
        """Compute each item without gradients in one rank, item i in rank i modulo the number of ranks. Return the
        results of all items, of type `kind`. Raises OtherRankFailed if an item fails in another rank."""
        ...

    def update(self) -> None:
        """Update the weights from the optimiser's masters after a step."""
        ...

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return the trained weights by name. Only names, dtypes and shapes may be read, not the values."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight's name and tensor, in the order of `state`. All ranks call this together and read to the
        end. The next tensor may overwrite the previous one."""
        ...

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the weights from `state`, after the optimiser has loaded its state. Raises WeightsError for other names
        or shapes."""
        ...

    def check_finite(self, name: str, version: int) -> None:
        """Refuse weights that are infinite or not a number. Raises NotFinite if they are in this rank, OtherRankFailed
        if they are in another rank."""
        ...

    def publish(self, name: str, version: int, probe: Probe | None, *, adapter: str | None) -> WeightRef:
        """Publish a copy of the weights, with the arguments of `weights.inline.publish`. This may end the previous
        publication."""
        ...

    def close(self) -> None:
        """End the publication. May be called from another thread, and twice."""
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
        """Do nothing: published weights are a copy in memory."""


def drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Read the rest of `TrainedWeights.tensors`, even after an error, because other ranks gather these tensors."""
    for _ in tensors:
        pass
