"""`Gathered`: parameters of the Llama family held in shards, gathered for one stage of the decoder at a time.

A rank keeps its shard of the optimiser's masters, and one buffer that is as large as the largest stage: all parameters
are views of the buffer. To gather a stage, each rank casts its shard's elements into the buffer and sends them to the
other ranks. Nothing is added, so the bits are those of whole parameters. The backward pass gathers each layer again,
and exchanges its gradients as soon as they are computed.

All ranks do the same exchanges in the same order, the script. A rank without a part to compute, or whose computation
has failed, takes part in the exchanges too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparring.errors import refusal
from sparring.model.causal import CausalModel
from sparring.model.decoder import FAMILY, LlamaDecoder, Stream
from sparring.model.experts import RowExperts
from sparring.model.layers import Product
from sparring.train.exchange import GradientExchange, presence
from sparring.train.optimiser import Optimiser
from sparring.train.ranks import OutOfStep, Ranks, in_step

ALIGNMENT = 64
"""Alignment of a parameter in the buffer, in bytes; torch aligns its own tensors so."""
GATHER, EXCHANGE = "gather", "exchange"
SHARD = "cluster.shard"
"""Key of a recipe that asks for parameters in shards."""

OTHERWISE = 'set it to "optimiser", which every model can have'

Step = tuple[str, int]
"""Step of a script: gather the parameters of a stage, or exchange their gradients."""


class Piece(NamedTuple):
    """Bytes [first, end) of the buffer: the elements of parameters `names` that rank `owner` has in its shard."""

    owner: int
    first: int
    end: int
    names: tuple[str, ...]


class Stage(NamedTuple):
    """Stage of a decoder.

    Attributes:
        packed: modules of the stage that hold packed copies of its parameters.
        gives: parameters whose gradients are complete at the end of the stage's backward pass.
    """

    pieces: tuple[Piece, ...]
    packed: tuple[Product | RowExperts, ...]
    gives: tuple[str, ...]


class Gathered:
    """Parameters of a model that are gathered stage by stage. Implements `Gatherer`.

    Args:
        model: model whose parameters become views of the buffer.
        optimiser: optimiser of all the model's parameters, made with `apart`.
        stages: names of the parameters of each stage of the model's decoder.
    """

    def __init__(self, model: CausalModel, optimiser: Optimiser, stages: Sequence[Sequence[str]], ranks: Ranks) -> None:
        self._optimiser, self._ranks = optimiser, ranks
        self._own, self._ranges = optimiser.own, optimiser.ranges
        self._parameters = dict(zip(optimiser.names, optimiser.parameters, strict=True))
        self._exchange = GradientExchange(optimiser, ranks)
        self._gradients: dict[str, torch.Tensor] = {}
        self._places, size = _places(self._parameters, stages)
        self.buffer = torch.empty(size, dtype=torch.uint8)
        for name, parameter in self._parameters.items():
            parameter.data = self._view(name)
            parameter.register_hook(partial(self._take, name))
        packed, first = model.packed_parts(), set[str]()
        self._stages = list[Stage]()
        for names in stages:
            gives = tuple(name for name in names if name not in first)
            of_names = {id(self._parameters[name]) for name in names}
            parts = tuple(part for part, weight in packed if id(weight) in of_names) if self._stages else ()
            self._stages.append(Stage(tuple(self._pieces(names)), parts, gives))
            first |= set(names)
        last = len(stages) - 1
        self._forward: list[Step] = [(GATHER, stage) for stage in range(len(stages))]
        self._backward: list[Step] = [(EXCHANGE, last)]
        self._backward += [(kind, stage) for stage in range(last - 1, 0, -1) for kind in (GATHER, EXCHANGE)]
        self._backward += [(EXCHANGE, 0)]
        self._script, self._done, self._trains = list[Step](), 0, False
        self._packed: tuple[Product | RowExperts, ...] = ()
        self._spare: list[torch.Tensor] = []
        decoder = model.decoder
        assert decoder is not None, "its stages were named"
        self._recomputes = decoder.gradient_checkpointing
        self._layouts = {part: part.packed.layout for part, _ in packed if isinstance(part, Product)}
        for part, _ in packed:
            part.drop()
        decoder.gatherer = self

    @contextmanager
    def passes(self, *, backward: bool = False) -> Iterator[None]:
        """Compute the forward pass of the model within the context, with `backward` also the backward pass, or nothing
        at all. All ranks enter the context together; at its end this rank takes part in the remaining exchanges."""
        self._script, self._done = self._forward + (self._backward if backward else []), 0
        self._trains = backward
        try:
            yield
        except OutOfStep:
            raise
        except BaseException:
            self._gradients.clear()
            self._finish()
            raise
        self._finish()

    def enter(self, stage: int) -> None:
        self._next(GATHER, stage, packs=True)

    def entered(self, stage: int, stream: Stream) -> Stream:
        self.enter(stage)
        return self._watched(stream, partial(self._next, EXCHANGE, stage))

    def left(self, stage: int, stream: Stream) -> Stream:
        return self._watched(stream, partial(self._next, GATHER, stage, packs=self._recomputes))

    def whole(self, name: str) -> torch.Tensor:
        """Gather one parameter from all ranks, and return its values, which the next call overwrites. All ranks call
        this together."""
        with in_step(f"rank {self._ranks.rank}: gathering of {name}"):
            for piece in self._pieces([name]):
                self._bring(piece)
        return self._parameters[name].detach()

    def _watched(self, stream: Stream, before: Callable[[], None]) -> Stream:
        if not (self._trains and torch.is_grad_enabled()):
            return stream
        watched: Stream = _Watched.apply(before, *stream)  # type: ignore[no-untyped-call]
        return watched

    def _next(self, kind: str, stage: int, *, packs: bool = False) -> None:
        """Do the next step of the script. Raises OutOfStep if that step is not of this kind and stage."""
        expected = self._script[self._done] if self._done < len(self._script) else ("nothing", -1)
        if expected != (kind, stage):
            where, found = f"rank {self._ranks.rank}", f"{kind} of stage {stage}"
            raise OutOfStep(f"{where}: expected {expected[0]} of stage {expected[1]}, got {found}; report it")
        with in_step(f"rank {self._ranks.rank}: {kind} of stage {stage}"):
            if kind == GATHER:
                for piece in self._stages[stage].pieces:
                    self._bring(piece)
            else:
                names = self._stages[stage].gives
                self._exchange.run(names, self._gradients, self._ranks.gather(presence(names, self._gradients)))
        self._done += 1
        if kind == GATHER:
            self._repack(self._stages[stage].packed if packs else ())

    def _finish(self) -> None:
        while self._done < len(self._script):
            self._next(*self._script[self._done])

    def _bring(self, piece: Piece) -> None:
        """Send the elements of a piece to the other ranks if this rank has them in its shard, else receive them."""
        if piece.owner == self._ranks.rank:
            for name in piece.names:
                begin, end = self._ranges[name]
                self._view(name).view(-1)[begin:end].copy_(self._own[name].view(-1))
        self._ranks.broadcast(self.buffer[piece.first : piece.end], piece.owner)

    def _repack(self, parts: tuple[Product | RowExperts, ...]) -> None:
        """Drop the packed copies of the previous stage, and pack this stage's parameters, in that memory if
        possible."""
        for part in self._packed:
            if isinstance(part, Product):
                self._spare.append(part.drop())
            else:
                part.drop()
        self._packed = parts
        for part in parts:
            if isinstance(part, Product):
                part.refresh(self._storage(part))

    def _storage(self, product: Product) -> torch.Tensor | None:
        for index, storage in enumerate(self._spare):
            if (storage.shape, storage.dtype) == self._layouts[product]:
                return self._spare.pop(index)
        self._spare.clear()
        return None

    def _take(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Take a gradient from autograd, and leave autograd a placeholder that needs no memory."""
        self._gradients[name] = gradient
        return gradient.new_zeros(()).expand_as(gradient)

    def _view(self, name: str) -> torch.Tensor:
        parameter, first = self._parameters[name], self._places[name]
        return self.buffer[first : first + parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def _pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        for owner, shard in enumerate(self._optimiser.shards):
            own = tuple(name for name in names if name in shard)
            if own:
                (begin, _), (_, end) = shard[own[0]], shard[own[-1]]
                first = self._places[own[0]] + begin * self._parameters[own[0]].element_size()
                yield Piece(owner, first, self._places[own[-1]] + end * self._parameters[own[-1]].element_size(), own)


class _Watched(Function):
    """Identity function of tensors x and y that calls `before` in its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, before: Callable[[], None], x: torch.Tensor, y: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return views of x[N, D] and y[N, D]."""
        ctx.before = before
        ctx.set_materialize_grads(False)
        return x.view_as(x), None if y is None else y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Any, grad_y: Any) -> tuple[Any, ...]:
        """Return the gradients as they are."""
        ctx.before()
        return None, grad_x, grad_y


def stages_of(model: CausalModel, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the parameters of each stage of a model's decoder, in their order.

    Args:
        names: name of each trained parameter by its id, in the order of the parameters.

    Raises:
        BadInput: the model has no decoder with stages, or only an adapter of the model is trained.
    """
    if not isinstance(model.decoder, LlamaDecoder):
        expected, found = f"a model of {', '.join(FAMILY)}", model.config.model_type
        raise refusal(SHARD, expected, found, OTHERWISE)
    if model.adapters.everywhere is not None:
        raise refusal(SHARD, "a model that is trained as a whole", "an adapter", OTHERWISE)
    body: Any = model.module.base_model
    modules: list[tuple[nn.Module, ...]] = [(body.embed_tokens,), *((layer,) for layer in body.layers)]
    modules.append((body.norm, model.head))
    stages = []
    for parts in modules:
        inside = {id(parameter) for part in parts for parameter in part.parameters()}
        stages.append([name for key, name in names.items() if key in inside])
    missing = set(names.values()) - {name for stage in stages for name in stage}
    if missing:
        raise refusal(SHARD, "parameters of the embedding, layers, norm and head", min(missing), OTHERWISE)
    return stages


def _places(parameters: Mapping[str, nn.Parameter], stages: Sequence[Sequence[str]]) -> tuple[dict[str, int], int]:
    """Return the position of each parameter in the buffer in bytes, and the size of the buffer. Each stage begins at
    the start of the buffer, with the parameters that another stage has too."""
    places, size = dict[str, int](), 0
    for names in stages:
        at = 0
        for name in names:
            at = places.setdefault(name, at) + -(-parameters[name].nbytes // ALIGNMENT) * ALIGNMENT
        size = max(size, at)
    return places, size
