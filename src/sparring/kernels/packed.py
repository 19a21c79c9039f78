"""Weights in the layout that the matrix product reads.

Shapes: K inputs, M outputs, E weights of one shape.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from sparring.errors import refusal
from sparring.kernels.memory import zeros
from sparring.kernels.paths import path_of

_LATER: ContextVar[bool] = ContextVar("packed later", default=False)


@contextmanager
def packed_later() -> Iterator[None]:
    """Let weights that are made within the context have no packed values until `update`."""
    token = _LATER.set(True)
    try:
        yield
    finally:
        _LATER.reset(token)


class PackedWeight:
    """Weights [M_i, K] with the same inputs, their rows joined to [M, K], in the layout that the matrix product reads.
    Gradients flow to `weights`."""

    __slots__ = ("dtype", "num_inputs", "num_outputs", "storage", "weights")

    def __init__(self, *weights: torch.Tensor, storage: torch.Tensor | None = None) -> None:
        for weight in weights:
            if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
                given = f"{tuple(weight.shape)} {weight.dtype}"
                raise refusal("pack", "a float32 or bfloat16 matrix", given, "cast it")
        self.num_outputs, self.num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        self.dtype = weights[0].dtype
        self.weights = weights
        if _LATER.get():
            self.storage = weights[0].new_empty(0)
        else:
            self.storage = _packed(weights, storage)

    @property
    def layout(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the packed values."""
        return _layout(self.weights)

    def drop(self) -> torch.Tensor:
        """Drop the packed values, which `update` packs again; return their storage."""
        storage, self.storage = self.storage, self.storage.new_empty(0)
        return storage

    def update(self, *weights: torch.Tensor, storage: torch.Tensor | None = None) -> None:
        """Pack changed values in place, for float32 without an allocation; after `drop`, into `storage` or new memory.
        Shapes must be the same."""
        if [w.shape for w in weights] != [w.shape for w in self.weights] or any(
            w.dtype is not self.dtype for w in weights
        ):
            given = f"{[tuple(w.shape) for w in weights]} {weights[0].dtype}"
            raise refusal(
                "PackedWeight.update", f"{[tuple(w.shape) for w in self.weights]} {self.dtype}", given, "pack it anew"
            )
        self.weights = weights
        self.storage = path_of(weights[0]).pack(weights, self.storage if self.storage.numel() else storage)

    def pack_values(self, *weights: torch.Tensor) -> torch.Tensor:
        """Pack other values into new storage, and return it."""
        return path_of(weights[0]).pack(weights, None)

    def with_weights(self, *weights: torch.Tensor) -> PackedWeight:
        """Return a copy with the same packed values whose gradients flow to `weights`, in another graph."""
        copied = copy.copy(self)
        copied.weights = weights
        return copied


def _packed(weights: Sequence[torch.Tensor], storage: torch.Tensor | None) -> torch.Tensor:
    """Pack as `KernelPath.pack`; on torch's meta device return a tensor of the layout."""
    if weights[0].is_meta:
        shape, dtype = _layout(weights)
        return torch.empty(shape, dtype=dtype, device="meta") if storage is None else storage
    return path_of(weights[0]).pack(weights, storage)


def _layout(weights: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    counts = [len(weight) for weight in weights]
    return path_of(weights[0]).packed_layout(counts, weights[0].shape[1], weights[0].dtype)


def pack(*weights: torch.Tensor) -> PackedWeight:
    """Pack weights[M_i, K], float32 or bfloat16, as one matrix. After a change of a weight in place, call `update`."""
    return PackedWeight(*weights)


class PackedStack:
    """E packed weights [M, K] of one shape and dtype, contiguous in `storage` [E, ...]; `matrices` are views of single
    weights. An empty list, and different shapes or dtypes, are refused (`BadInput`)."""

    __slots__ = ("dtype", "matrices", "num_inputs", "num_outputs", "storage")

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        if len({(weight.shape, weight.dtype) for weight in weights}) != 1:
            given = str(sorted({f"{tuple(weight.shape)} {weight.dtype}" for weight in weights}))
            raise refusal("PackedStack", "matrices of one shape and dtype", given, "pack them apart")
        first = PackedWeight(weights[0])
        self.num_outputs, self.num_inputs, self.dtype = first.num_outputs, first.num_inputs, first.dtype
        self.storage = self._storage_like(first.storage, len(weights))
        self.matrices = [PackedWeight(weight, storage=part) for weight, part in zip(weights, self.storage, strict=True)]

    def update(self, weights: Sequence[torch.Tensor]) -> None:
        """Pack changed values in place."""
        for matrix, weight in zip(self.matrices, weights, strict=True):
            matrix.update(weight)

    def changes(self, weights: Sequence[torch.Tensor]) -> list[tuple[object, str, Any]]:
        """Pack other weights into new storage; return the assignments (object, attribute, value) that put them in
        place."""
        storage = self._storage_like(self.matrices[0].storage, len(weights))
        changes: list[tuple[object, str, Any]] = [(self, "storage", storage)]
        for matrix, weight, part in zip(self.matrices, weights, storage, strict=True):
            path_of(weight).pack((weight,), part)
            changes += [(matrix, "storage", part), (matrix, "weights", (weight,))]
        return changes

    @staticmethod
    def _storage_like(like: torch.Tensor, count: int) -> torch.Tensor:
        shape = (count, *like.shape)
        return zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_zeros(shape)
