"""`ShardedWeights`: weights of a trainer in shards; no rank has a whole copy (`sharded_parameters`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TypeVar

import msgspec
import torch

from sparring.model.causal import CausalModel
from sparring.store.codec import decode, encode
from sparring.train.measure import PlainMeasures
from sparring.train.non_finite import check_finite
from sparring.train.optimiser import Optimiser
from sparring.train.parts import Compute, Parts
from sparring.train.rank_parts import Dealt
from sparring.train.ranks import Ranks, agree
from sparring.train.sharded_parameters import Gathered, stages_of
from sparring.train.trained_weights import drain
from sparring.types import Sample, WeightRef
from sparring.weights.inline import Probe, reference
from sparring.weights.shared_memory import published_one_by_one

Item = TypeVar("Item")
Result = TypeVar("Result")


class ShardedWeights:
    """Weights of a model in shards. The `optimiser` has all parameters of the model, and is made with `apart`.
    Implements `TrainedWeights`."""

    def __init__(self, model: CausalModel, optimiser: Optimiser, ranks: Ranks) -> None:
        self._model, self._optimiser, self._ranks = model, optimiser, ranks
        names = {id(parameter): name for name, parameter in zip(optimiser.names, optimiser.parameters, strict=True)}
        self._gathered = Gathered(model, optimiser, stages_of(model, names), ranks)
        self.parts: Parts = Dealt(optimiser, ranks, self._round)
        self._published = ExitStack()

    def _round(self, rows: Sequence[Sample] | None, compute: Compute) -> list[PlainMeasures]:
        """Compute a round whose gradients are exchanged during the backward pass (`rank_parts.Round`)."""

        def own() -> bytes:
            with self._gathered.passes(backward=True):
                part = None if rows is None else compute(rows)
                if part is None:
                    return msgspec.msgpack.encode(None)
                torch.autograd.grad(part.loss, self._optimiser.parameters, allow_unused=True)
                return msgspec.msgpack.encode(part.measures())

        reports = [msgspec.msgpack.decode(data, type=PlainMeasures | None) for data in agree(self._ranks, own)]
        return [each for each in reports if each is not None]

    def computing(self) -> AbstractContextManager[None]:
        return self._gathered.passes()

    def deal(self, items: Sequence[Item], compute: Callable[[Item], Result], kind: type[Result]) -> list[Result]:
        """Compute items in rounds of one per rank. A rank without an item still takes part in gathering parameters."""
        results, count = list[Result](), self._ranks.count

        def own(number: int) -> bytes:
            with self.computing():
                return msgspec.msgpack.encode([compute(items[number])] if number < len(items) else [])

        for first in range(0, len(items), count):
            for data in agree(self._ranks, partial(own, first + self._ranks.rank)):
                results += msgspec.msgpack.decode(data, type=list[kind])  # type: ignore[valid-type]
        return results

    def update(self) -> None:
        """Do nothing: the weights are gathered from the masters."""

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._model.state()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        trained = set(self._optimiser.names)
        for name, tensor in self._model.state().items():
            yield name, self._gathered.whole(name) if name in trained else tensor

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._model.check(state)
        self._optimiser.load_weights(state)

    def check_finite(self, name: str, version: int) -> None:
        dtype = self._model.dtype

        def own() -> bytes:
            check_finite({key: master.to(dtype) for key, master in self._optimiser.own.items()}, name, version)
            return b""

        agree(self._ranks, own)

    def publish(self, name: str, version: int, probe: Probe | None, *, adapter: str | None) -> WeightRef:
        """Publish the weights in shared memory: rank 0 writes one tensor after the other."""
        self._published.close()
        state, stream = self._model.state(), self.tensors()

        def describe(published: Mapping[str, torch.Tensor]) -> WeightRef:
            return reference(name, version, published, probe, adapter=adapter)

        def first() -> bytes:
            where = f"weights of {name} version {version}"
            try:
                if self._ranks.rank:
                    return b""
                ref = self._published.enter_context(published_one_by_one(where, state, stream, describe))
                return encode(ref)
            finally:
                drain(stream)

        return decode(agree(self._ranks, first)[0], WeightRef)

    def close(self) -> None:
        self._published.close()
