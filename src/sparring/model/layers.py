"""Modules that replace the library's, sharing its parameters: the same numbers, in an order that ignores the batch.

torch changes a row's bits with the number of rows: matrix products pick another kernel, vectorised cos, exp and silu treat
the tail of a tensor differently. Each module here calls one row-invariant operation. N rows, K inputs, M outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from sparring.model.kernels import ops


class RowLinear(nn.Module):
    """`nn.Linear` through our packed matrix product. `refresh()` after every change of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = ops.pack(linear.weight)

    def forward(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[..., K] -> [..., M], of `out_dtype` or of the dtype of x."""
        if x.dim() == 2:
            return ops.linear(x, self.packed, self.bias, out_dtype)
        return ops.linear(x.reshape(-1, self.in_features), self.packed, self.bias).view(*x.shape[:-1], self.out_features)

    def refresh(self) -> None:
        """Pack the weight anew."""
        self.packed.update(self.weight)


class RowNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, eq. 4) over the last dimension, in float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return ops.rms_norm(x, self.weight, self.variance_epsilon)


class RowSilu(nn.Module):
    """x * sigmoid(x), the same bits for an element wherever it lies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return ops.silu(x)


class RotaryTable(nn.Module):
    """Rotary cosines and sines of every position, computed once by the library's own module and looked up by position."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, rotary: nn.Module, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(max_positions, device=device).unsqueeze(0)
        cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
        self.register_buffer("cos", cos[0].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0].contiguous(), persistent=False)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions[N] -> cos[N, d], sin[N, d]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The library's signature: position_ids[B, N] -> cos[B, N, d], sin[B, N, d]."""
        return self.cos[position_ids], self.sin[position_ids]
