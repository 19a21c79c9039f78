"""Weights in the order in which the matrix product reads them.

K inputs, M outputs, E weights of one shape.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from sparring.errors import refusal
from sparring.kernels.memory import zeros
from sparring.kernels.paths import path_of


class PackedWeight:
    """Weights [M_i, K] of one input, their rows joined to [M, K], in the order in which the matrix product reads them.

    `weights` are the tensors that gradients flow to. `storage`: where the packed numbers go; None for memory of their
    own.
    """

    __slots__ = ("storage", "weights", "num_outputs", "num_inputs", "dtype")

    def __init__(self, *weights: torch.Tensor, storage: torch.Tensor | None = None) -> None:
        for weight in weights:
            if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
                got = f"{tuple(weight.shape)} {weight.dtype}"
                raise refusal("pack", "a float32 or bfloat16 matrix", got, "cast it")
        self.num_outputs, self.num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        self.dtype = weights[0].dtype
        self.weights = weights
        self.storage = path_of(weights[0]).pack(weights, storage)

    def update(self, *weights: torch.Tensor) -> None:
        """Pack again after the values changed: in place, without an allocation for float32. Shapes stay."""
        if [w.shape for w in weights] != [w.shape for w in self.weights] or any(
            w.dtype is not self.dtype for w in weights
        ):
            got = f"{[tuple(w.shape) for w in weights]} {weights[0].dtype}"
            raise refusal(
                "PackedWeight.update", f"{[tuple(w.shape) for w in self.weights]} {self.dtype}", got, "pack it anew"
            )
        self.weights = weights
        self.storage = path_of(weights[0]).pack(weights, self.storage)

    def pack_values(self, *weights: torch.Tensor) -> torch.Tensor:
        """Pack other values beside these, and return their storage."""
        return path_of(weights[0]).pack(weights, None)

    def with_weights(self, *weights: torch.Tensor) -> PackedWeight:
        """Copy this with the same packed numbers; gradients flow to `weights`, the same values out of another graph."""
        copied = copy.copy(self)
        copied.weights = weights
        return copied


def pack(*weights: torch.Tensor) -> PackedWeight:
    """Pack weights[M_i, K] (float32 or bfloat16) as one. Call `update` after every in-place change of them."""
    return PackedWeight(*weights)


class PackedStack:
    """Weights [M, K] of one shape and dtype, E of them, packed one behind the other in `storage` [E, ...]; `matrices`
    has each alone.

    Raises:
        BadInput: there is none, or they differ.
    """

    __slots__ = ("storage", "matrices", "num_outputs", "num_inputs", "dtype")

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        if len({(weight.shape, weight.dtype) for weight in weights}) != 1:
            got = str(sorted({f"{tuple(weight.shape)} {weight.dtype}" for weight in weights}))
            raise refusal("PackedStack", "matrices of one shape and dtype", got, "pack them apart")
        first = PackedWeight(weights[0])
        self.num_outputs, self.num_inputs, self.dtype = first.num_outputs, first.num_inputs, first.dtype
        self.storage = self._storage_like(first.storage, len(weights))
        self.matrices = [PackedWeight(weight, storage=part) for weight, part in zip(weights, self.storage, strict=True)]

    def update(self, weights: Sequence[torch.Tensor]) -> None:
        """Pack again, in place, after the values changed."""
        for matrix, weight in zip(self.matrices, weights, strict=True):
            matrix.update(weight)

    def changes(self, weights: Sequence[torch.Tensor]) -> list[tuple[object, str, Any]]:
        """Pack other weights beside the old ones; return the assignments (object, attribute, value) that put them in
        use."""
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
