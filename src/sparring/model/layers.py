"""Replacements of transformers' modules, with shared parameters; each computes a row with bits that do not depend on
the batch.

torch changes a row's bits with the number of rows: matrix products choose another kernel, and vectorised cos, exp and
silu treat the tail of a tensor differently. Each module here calls one row-invariant operation. Shapes: N rows, K
inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparring.kernels import ops
from sparring.model.rowwise import row_invariant

Values = Callable[[nn.Parameter], torch.Tensor]
"""Function from a parameter to the tensor that replaces its values."""
Changes = list[tuple[object, str, Any]]
"""Assignments: (object, name of an attribute, its new value)."""

Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function (x, which gives the dtype; positions [1, N]) -> cosines and sines [1, N, d]."""

Adapted = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function (x[N, K], y[N, M]) -> adapted output [N, M]."""


class RowLinear(nn.Module):
    """`nn.Linear` as a packed matrix product. Call `refresh()` after every change of the weight."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.weight = linear.get_parameter("weight")
        self.bias = getattr(linear, "bias", None)
        self.out_features, self.in_features = self.matrix(current_value).shape
        self._product: Product | None = None

    def matrix(self, values: Values) -> torch.Tensor:
        """Return the matrix [M, K] of the values that `values` gives for the weight."""
        return values(self.weight)

    @property
    def product(self) -> Product:
        """Return the product, packed at first use: a weight that is only part of a joint product is not packed
        twice."""
        if self._product is None:
            self._product = Product(self)
        return self._product

    @row_invariant
    def forward(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, total: ops.WeightSum | None = None
    ) -> torch.Tensor:
        """Multiply x[..., K] -> [..., M], in `out_dtype` or the dtype of x. For `total`, which needs x[N, K], see
        `ops.linear`."""
        if x.dim() == 2:
            return self.product(x, out_dtype, total)
        return self.product(x.reshape(-1, self.in_features), out_dtype).view(*x.shape[:-1], self.out_features)

    def refresh(self) -> None:
        """Pack the weight again."""
        if self._product is not None:
            self._product.refresh()

    def derived(self, values: Values) -> Changes:
        """Return the assignments that replace the packed weight by packed `values`; empty before the first use."""
        return [] if self._product is None else self._product.derived(values)

    def copies(self) -> list[torch.Tensor]:
        """Return the packed weight; nothing before the first use."""
        return [] if self._product is None else self._product.copies()


class RowConv1D(RowLinear):
    """`RowLinear` for transformers' `Conv1D`, whose weight is [K, M] (GPT-2)."""

    def matrix(self, values: Values) -> torch.Tensor:
        """Return the transposed weight, [M, K]."""
        return values(self.weight).t()


class Product:
    """Linear layers with the same input, joined into one matrix product; their outputs are concatenated. Call
    `refresh()` after every change of a weight.

    Attributes:
        bias: joined bias in float32, as the compiled product reads it; None if no layer has one.
        adapted: function of x[N, K] and the product [N, sum of M] that adds adapters; None in a model without adapters.
    """

    def __init__(self, *parts: RowLinear) -> None:
        self.parts = parts
        self.sizes = [part.out_features for part in parts]
        self.packed = ops.pack(*(part.matrix(current_value) for part in parts))
        self.bias = self._joined_bias(current_value)
        self.adapted: Adapted | None = None

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, total: ops.WeightSum | None = None
    ) -> torch.Tensor:
        """Multiply x[N, K] -> [N, sum of M], in `out_dtype` or the dtype of x. For `total` see `ops.linear`."""
        packed, bias = self.packed, self.bias
        if torch.is_grad_enabled():
            packed = packed.with_weights(*(part.matrix(current_value) for part in self.parts))
            bias = None if bias is None else torch.cat([part.bias for part in self.parts if part.bias is not None])
        y = ops.linear(x, packed, bias, out_dtype, total)
        return y if self.adapted is None else self.adapted(x, y)

    def drop(self) -> torch.Tensor:
        """Drop the packed weights until `refresh`; return their storage."""
        return self.packed.drop()

    def refresh(self, storage: torch.Tensor | None = None) -> None:
        """Pack the weights again; after `drop`, into `storage` if given."""
        self.packed.update(*(part.matrix(current_value) for part in self.parts), storage=storage)
        self.bias = self._joined_bias(current_value)

    def derived(self, values: Values) -> Changes:
        """Return the assignments that replace packed weights and bias by `values`."""
        weights = tuple(part.matrix(values) for part in self.parts)
        changes = [(self.packed, "storage", self.packed.pack_values(*weights)), (self.packed, "weights", weights)]
        return [*changes, (self, "bias", self._joined_bias(values))]

    def copies(self) -> list[torch.Tensor]:
        """Return the packed weights."""
        return [self.packed.storage]

    def _joined_bias(self, values: Values) -> torch.Tensor | None:
        if self.parts[0].bias is None:
            return None
        return torch.cat([values(part.bias).detach().float() for part in self.parts if part.bias is not None])


def current_value(parameter: nn.Parameter) -> torch.Tensor:
    """Return the parameter itself; the `Values` function of the current weights."""
    return parameter


class RowNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, eq. 4) over the last dimension, in float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., D] -> [..., D]."""
        return ops.rms_norm(x, self.weight, self.variance_epsilon)


class WideNorm(nn.Module):
    """Root mean square norm times weight + `offset`, rounded only after the multiplication by the weight (Gemma, with
    offset 1; GPT-OSS)."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon, self.offset = eps, offset

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., D] -> [..., D]."""
        return ops.rms_norm(x.float(), self.weight.float() + self.offset, self.variance_epsilon).to(x.dtype)


class RowGelu(nn.Module):
    """GELU by its tanh formula, with the same bits for an element at any position."""

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute GELU, any shape."""
        return ops.gelu_tanh(x)


class RowSilu(nn.Module):
    """x * sigmoid(x), with the same bits for an element at any position."""

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute SiLU, any shape."""
        return ops.silu(x)


class RotaryTable(nn.Module):
    """Rotary cosines and sines of every position, computed once by transformers' own module and looked up by
    position."""

    cos: torch.Tensor
    sin: torch.Tensor
    config: Any = None

    def __init__(self, rotary: Rotary, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(max_positions, device=device).unsqueeze(0)
        cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions)
        self.register_buffer("cos", cos[0].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0].contiguous(), persistent=False)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up positions[N] -> cos[N, d], sin[N, d]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up position_ids[B, N] -> cos[B, N, d], sin[B, N, d], with transformers' signature. For [axes, B, N] the
        first axis is used: vision models have three axes, which are equal in text."""
        places = position_ids[0] if position_ids.dim() == 3 else position_ids
        return self.cos[places], self.sin[places]


class RotaryPhases(nn.Module):
    """Rotary table of a model that rotates by complex numbers (DeepSeek-V2)."""

    phases: torch.Tensor

    def __init__(
        self, rotary: Callable[..., torch.Tensor], max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        positions = torch.arange(max_positions, device=device).unsqueeze(0)
        phases = rotary(torch.empty(0, dtype=dtype, device=device), positions)
        self.register_buffer("phases", phases[0].contiguous(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Look up position_ids[B, N] -> [B, N, d / 2], with transformers' signature."""
        return self.phases[position_ids]


class RotaryTables(nn.Module):
    """One rotary table for each kind of layer (Gemma 3: local layers rotate faster than global ones)."""

    def __init__(self, tables: Mapping[str, RotaryTable]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up position_ids[B, N] -> cos[B, N, d], sin[B, N, d], with transformers' signature."""
        angles: tuple[torch.Tensor, torch.Tensor] = self.tables[layer_type](x, position_ids)
        return angles
