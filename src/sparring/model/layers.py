"""Modules that replace the library's, sharing its parameters: the same numbers, in an order that ignores the batch.

torch changes a row's bits with the number of rows: matrix products pick another kernel, vectorised cos, exp and silu
treat the tail of a tensor differently. Each module here calls one row-invariant operation. N rows, K inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from sparring.kernels import ops
from sparring.model.rowwise import row_invariant

Values = Callable[[nn.Parameter], torch.Tensor]
"""Function that gives the tensor to put in a parameter's place."""
Changes = list[tuple[object, str, Any]]
"""Of which objects which attributes are to have which values."""

Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of x, for its dtype, and positions [1, N]: cosines and sines [1, N, d]."""

Adapted = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of x[N, K] and y[N, M] -> [N, M]."""


class RowLinear(nn.Module):
    """`nn.Linear` through our packed matrix product. `refresh()` after every change of the weight."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = getattr(linear, "bias", None)
        self.out_features, self.in_features = self.matrix(current_value).shape
        self._product: Product | None = None

    def matrix(self, values: Values) -> torch.Tensor:
        """Return its weight, or other values of it, [M, K]."""
        return values(self.weight)

    @property
    def product(self) -> Product:
        """Return the product, packed when it is first asked for: a weight that only serves as part of a joint product
        is not packed twice."""
        if self._product is None:
            self._product = Product(self)
        return self._product

    @row_invariant
    def forward(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, total: ops.WeightSum | None = None
    ) -> torch.Tensor:
        """Multiply [..., K] -> [..., M], of `out_dtype` or of the dtype of x. `total`: see `ops.linear`; for x[N,
        K]."""
        if x.dim() == 2:
            return self.product(x, out_dtype, total)
        return self.product(x.reshape(-1, self.in_features), out_dtype).view(*x.shape[:-1], self.out_features)

    def refresh(self) -> None:
        """Pack the weight anew."""
        if self._product is not None:
            self._product.refresh()

    def derived(self, values: Values) -> Changes:
        """Return the assignments that put other values than the parameters have in use; none where no product was asked
        for."""
        return [] if self._product is None else self._product.derived(values)


class RowConv1D(RowLinear):
    """`RowLinear` of the library's `Conv1D`, whose weight is [K, M] (GPT-2)."""

    def matrix(self, values: Values) -> torch.Tensor:
        """Return the transposed weight, [M, K]."""
        return values(self.weight).t()


class Product:
    """Linear layers of one input as one matrix product; their outputs stand side by side. `refresh()` as for each of
    them.

    `bias` is the joined bias in float32, as the compiled product reads it; None where no layer has one. `adapted` is
    what adapters make of x[N, K] and the product [N, sum of M]; None where the model has none.
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
        """Multiply x[N, K] -> [N, sum of M], of `out_dtype` or of the dtype of x. `total`: see `ops.linear`."""
        packed, bias = self.packed, self.bias
        if torch.is_grad_enabled():
            packed = packed.with_weights(*(part.matrix(current_value) for part in self.parts))
            bias = None if bias is None else torch.cat([part.bias for part in self.parts])
        y = ops.linear(x, packed, bias, out_dtype, total)
        return y if self.adapted is None else self.adapted(x, y)

    def refresh(self) -> None:
        """Pack the weights anew."""
        self.packed.update(*(part.matrix(current_value) for part in self.parts))
        self.bias = self._joined_bias(current_value)

    def derived(self, values: Values) -> Changes:
        """Return the assignments that put other values than the parameters have in use."""
        weights = tuple(part.matrix(values) for part in self.parts)
        changes = [(self.packed, "storage", self.packed.pack_values(*weights)), (self.packed, "weights", weights)]
        return [*changes, (self, "bias", self._joined_bias(values))]

    def _joined_bias(self, values: Values) -> torch.Tensor | None:
        if self.parts[0].bias is None:
            return None
        return torch.cat([values(part.bias).detach().float() for part in self.parts])


def current_value(parameter: nn.Parameter) -> torch.Tensor:
    """Return the parameter itself, whose values are in use."""
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
    """Root mean square norm times weight + `offset`, rounded only behind the weight (Gemma, where the offset is 1;
    GPT-OSS)."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon, self.offset = eps, offset

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., D] -> [..., D]."""
        return ops.rms_norm(x.float(), self.weight.float() + self.offset, self.variance_epsilon).to(x.dtype)


class RowGelu(nn.Module):
    """GELU by its tanh formula, the same bits for an element wherever it lies."""

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute GELU, any shape."""
        return ops.gelu_tanh(x)


class RowSilu(nn.Module):
    """x * sigmoid(x), the same bits for an element wherever it lies."""

    @row_invariant
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute SiLU, any shape."""
        return ops.silu(x)


class RotaryTable(nn.Module):
    """Rotary cosines and sines of every position, computed once by the library's own module and looked up by
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
        """Look up position_ids[B, N] -> cos[B, N, d], sin[B, N, d], in the library's signature. Of [axes, B, N] the
        first is taken: a model that also sees images has three, which are equal in text."""
        places = position_ids[0] if position_ids.dim() == 3 else position_ids
        return self.cos[places], self.sin[places]


class RotaryPhases(nn.Module):
    """Rotary table of a model that turns by complex numbers (DeepSeek-V2)."""

    phases: torch.Tensor

    def __init__(
        self, rotary: Callable[..., torch.Tensor], max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        positions = torch.arange(max_positions, device=device).unsqueeze(0)
        phases = rotary(torch.empty(0, dtype=dtype, device=device), positions)
        self.register_buffer("phases", phases[0].contiguous(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Look up position_ids[B, N] -> [B, N, d / 2], in the library's signature."""
        return self.phases[position_ids]


class RotaryTables(nn.Module):
    """A table for each kind of layer (Gemma 3: local layers turn faster than global ones)."""

    def __init__(self, tables: Mapping[str, RotaryTable]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up position_ids[B, N] -> cos[B, N, d], sin[B, N, d], in the library's signature."""
        return self.tables[layer_type](x, position_ids)
