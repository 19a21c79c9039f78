"""Mixtures of experts, row by row: the experts and the output of a row depend on that row alone.

Shapes: N rows, D width, E experts, k experts per row, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from sparring.kernels import ops
from sparring.kernels.threads import take
from sparring.model.layers import Changes, RowLinear, Values
from sparring.model.rowwise import row_invariant

Gate = Callable[[torch.Tensor], torch.Tensor]
"""Function gate_up[N, 2 I] -> [N, I]."""

AdaptedExpert = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function (index of the product, 0 or 1; its input x[n, K]; its output y[n, M]) -> adapted output [n, M]."""


class ExpertAdapters(Protocol):
    """Terms that adapters add to the products of a layer's experts."""

    @property
    def targets(self) -> Sequence[object]:
        """The targets of adapters for the two stacked parameters."""

    @property
    def adds(self) -> bool:
        """True if an adapter adds to any row of the current call."""

    def __call__(self, rows: Sequence[torch.Tensor]) -> list[AdaptedExpert]:
        """Return, for each expert, the function that adds to its products; rows[e] [n] are the indices of its rows in
        the current call."""


class RowRouter(RowLinear):
    """Router that selects the `top_k` most likely experts of a row; `renormalise` and shares as in `ops.route`."""

    top_k: int

    def __init__(self, router: nn.Module, *, renormalise: bool) -> None:
        super().__init__(router)
        top_k = router.top_k
        assert isinstance(top_k, int)
        self.top_k = top_k
        self.renormalise = renormalise

    @row_invariant
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Route x[..., D] -> logits [N, E] and shares [N, k], both float32, and expert indices [N, k], most likely
        first."""
        # logits stay float32: rounding to the dtype of x would create ties
        logits = self.product(x.reshape(-1, self.in_features), torch.float32)
        chosen, shares = ops.route(logits, self.top_k, renormalised=self.renormalise)
        return logits, shares, chosen.long()


class RowExperts(nn.Module):
    """Experts of a mixture: gated MLPs, computed with one row-invariant product per expert.

    The outputs of a row are weighted and added in float32 in the order of its routing, so that neither the load of an
    expert nor the routing of other rows changes a bit. Call `refresh()` after every change of the weights.
    """

    def __init__(self, experts: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
        self.gate_up_proj_bias: nn.Parameter | None = getattr(experts, "gate_up_proj_bias", None)
        self.down_proj_bias: nn.Parameter | None = getattr(experts, "down_proj_bias", None)
        self.is_transposed = bool(experts.is_transposed)
        self._gate = gate
        self._stacks: list[ops.PackedStack] = []
        self.adapted: ExpertAdapters | None = None

    @property
    def stacks(self) -> list[ops.PackedStack]:
        """Return the packed weights of all experts for both products; packed at first use."""
        if not self._stacks:
            self._stacks = [ops.PackedStack(weights) for weights in self._weights()]
        return self._stacks

    @property
    def is_plain(self) -> bool:
        """True if `ops.mixture` computes the experts: gated by SiLU, without biases."""
        return self._gate is ops.swiglu and self.gate_up_proj_bias is None and self.down_proj_bias is None

    @row_invariant
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute x[N, D], chosen[N, k] experts, their shares[N, k] -> [N, D]."""
        training, adds = torch.is_grad_enabled(), self.adapted is not None and self.adapted.adds
        if self.is_plain and not (adds or training) and ops.is_compiled(x.device):
            gate_up, down = self.stacks
            return ops.mixture(x, gate_up, down, chosen.int(), shares.float())
        count, per_row = chosen.shape
        of_pair, order = chosen.flatten().sort(stable=True)
        loads = torch.bincount(of_pair, minlength=len(self.gate_up_proj))
        numbers = order // per_row
        adapted = None if self.adapted is None or not adds else self.adapted(numbers.split(loads.tolist()))
        rows = take(x, numbers)
        outputs = (self._one_by_one if training else self._grouped)(rows, loads, adapted)
        outputs = take(outputs, order.argsort()).view(count, per_row, -1).float()
        weighed = (outputs * shares.float().unsqueeze(-1)).unbind(1)
        total = weighed[0]
        for term in weighed[1:]:
            total = total + term
        return total.to(x.dtype)

    def _grouped(self, x: torch.Tensor, loads: torch.Tensor, adapted: Sequence[AdaptedExpert] | None) -> torch.Tensor:
        """Compute x[P, D] -> [P, D] without gradients, all experts in one call. The rows are sorted by expert; loads[E]
        counts them."""
        stacked = (self.gate_up_proj_bias, self.down_proj_bias)
        for place, (stack, biases) in enumerate(zip(self.stacks, stacked, strict=True)):
            y = ops.linear_groups(x, stack, biases, loads)
            if adapted is not None:
                parts = zip(adapted, *(rows.split(loads.tolist()) for rows in (x, y)), strict=True)
                y = torch.cat([one(place, x_e, y_e) for one, x_e, y_e in parts if len(x_e)])
            x = y if place else self._gate(y)
        return x

    def _one_by_one(
        self, x: torch.Tensor, loads: torch.Tensor, adapted: Sequence[AdaptedExpert] | None
    ) -> torch.Tensor:
        """Compute the same as `_grouped` with gradients, expert by expert."""
        # one graph node per stacked parameter: the gradient of each slice would be as large as the whole parameter
        pairs = zip(*self._weights(), *(stack.matrices for stack in self.stacks), strict=True)
        packed = [(gate_up.with_weights(one), down.with_weights(other)) for one, other, gate_up, down in pairs]
        biases = list(zip(*self._biases(), strict=True))
        outputs = [
            self._expert(part, packed[e], biases[e], None if adapted is None else adapted[e])
            for e, part in enumerate(x.split(loads.tolist()))
            if len(part)
        ]
        return torch.cat(outputs)

    def _expert(
        self,
        x: torch.Tensor,
        packed: Sequence[ops.PackedWeight],
        biases: Sequence[torch.Tensor | None],
        adapted: AdaptedExpert | None,
    ) -> torch.Tensor:
        for place, (weight, bias) in enumerate(zip(packed, biases, strict=True)):
            y = ops.linear(x, weight, bias)
            y = y if adapted is None else adapted(place, x, y)
            x = y if place else self._gate(y)
        return x

    def _weights(self, values: Values = lambda parameter: parameter) -> list[list[torch.Tensor]]:
        """Return the matrices [outputs, inputs] of all experts for both stacked parameters, or for other `values`."""
        parts = [values(parameter).unbind(0) for parameter in (self.gate_up_proj, self.down_proj)]
        return [[w.t() if self.is_transposed else w for w in part] for part in parts]

    def _biases(self) -> list[list[torch.Tensor | None]]:
        stacked = (self.gate_up_proj_bias, self.down_proj_bias)
        return [[None] * len(self.gate_up_proj) if bias is None else list(bias.unbind(0)) for bias in stacked]

    def drop(self) -> None:
        """Drop the packed weights, which are packed again when they are used."""
        self._stacks = []

    def refresh(self) -> None:
        """Pack the weights again."""
        for stack, weights in zip(self._stacks, self._weights(), strict=False):
            stack.update(weights)

    def derived(self, values: Values) -> Changes:
        """Return the assignments that replace the packed weights by packed `values`; empty before the first use."""
        pairs = zip(self._stacks, self._weights(values), strict=False)
        return [change for stack, weights in pairs for change in stack.changes(weights)]

    def copies(self) -> list[torch.Tensor]:
        """Return the packed weights; nothing before the first use."""
        return [stack.storage for stack in self._stacks]


def gates_of(experts: nn.Module) -> list[Gate]:
    """Return the gates that can be computed row by row; the caller selects the one that this module computes."""
    gates: list[Gate] = [ops.swiglu, _gelu_gate]
    limit, alpha = getattr(experts, "limit", None), getattr(experts, "alpha", None)
    if limit is not None and alpha is not None:
        gates.append(lambda gate_up: _clamped_gate(gate_up, limit, alpha))
    return gates


def _gelu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return ops.gelu_tanh(gate) * up


def _clamped_gate(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Compute (up + 1) * gate * sigmoid(alpha * gate) of clamped, interleaved values (GPT-OSS model card, 2025, section
    2.2)."""
    gate, up = (gate_up[:, part::2].float() for part in (0, 1))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1.0) * (ops.silu(gate * alpha) / alpha)).to(gate_up.dtype)
