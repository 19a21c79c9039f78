"""Mixtures of experts as row-invariant operations: routing, and the experts' outputs.

Shapes: N rows, D width, E experts, k experts per row, I width of an expert, K inputs, M outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sparring.errors import refusal
from sparring.kernels.checks import check_chosen, check_groups, check_logits
from sparring.kernels.packed import PackedStack
from sparring.kernels.paths import fused_path, path_name, path_of


def route(logits: torch.Tensor, count: int, *, renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `count` most likely experts of each row and their shares (Shazeer et al. 2017; Fedus et al. 2021).

    Args:
        logits: [N, E] float32.
        count: experts per row, k, at most E.
        renormalised: True if the softmax of the shares is over the chosen experts, so that a row's shares sum to one;
            False if it is over all experts.

    Returns:
        Expert indices [N, k] int32, most likely first, and shares [N, k] float32, with gradients.
    """
    check_logits("route", logits)
    if not 0 < count <= logits.shape[1]:
        raise refusal("route", f"1 to {logits.shape[1]} experts of a row", str(count), "check the model's config")
    if torch.is_grad_enabled() and logits.requires_grad:
        chosen: tuple[torch.Tensor, torch.Tensor] = _Route.apply(logits.contiguous(), count, renormalised)
        return chosen
    return _route(logits.detach().contiguous(), count, renormalised)


def _route(logits: torch.Tensor, count: int, renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    fused = fused_path(logits.device)
    if fused is not None:
        return fused.route(logits, count, renormalised)
    # in float64: torch's float32 exp computes the tail of a tensor differently
    shares, chosen = logits.double().softmax(-1).topk(count, -1)
    if renormalised:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen.int(), shares.float()


class _Route(Function):
    """`route` with the gradients of its softmax."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, count: int, renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose: logits[N, E] -> chosen and shares [N, k]."""
        chosen, shares = _route(logits, count, renormalised)
        ctx.save_for_backward(logits, chosen, shares)
        ctx.renormalised = renormalised
        ctx.mark_non_differentiable(chosen)
        return chosen, shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient of the logits: p (g - sum of p g), with p the softmax and g zero for experts that were
        not chosen."""
        logits, chosen, shares = ctx.saved_tensors
        pulled = grad - (grad * shares).sum(-1, keepdim=True)
        if ctx.renormalised:
            return torch.zeros_like(logits).scatter_(1, chosen.long(), shares * pulled), None, None
        gradient = logits.softmax(-1) * (pulled - grad)[:, :1]
        return gradient.scatter_(1, chosen.long(), shares * pulled), None, None


def linear_groups(
    x: torch.Tensor, packed: PackedStack, biases: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """Multiply x[N, K] by E weights, without gradients. The rows of x are sorted by weight: counts[e] rows use weight
    e. Biases are [E, M]. Each row is bitwise equal to that of `linear`."""
    check_groups(x, packed, biases, counts)
    fused, x = fused_path(x.device), x.contiguous()
    if fused is not None:
        return fused.linear_groups(x, packed, biases, counts)
    path = path_of(x)
    parts = zip(
        x.split(counts.tolist()),
        packed.matrices,
        [None] * len(packed.matrices) if biases is None else biases,
        strict=True,
    )
    outputs = [
        path.linear(part, matrix.storage, bias, matrix.num_outputs, x.dtype)
        for part, matrix, bias in parts
        if len(part)
    ]
    return torch.cat(outputs or [x.new_empty((0, packed.num_outputs))])


def mixture(
    x: torch.Tensor, gate_up: PackedStack, down: PackedStack, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Compute experts gated by SiLU, without biases or gradients, as one call of the compiled kernels: x[N, D] -> [N,
    D].

    Row n uses the experts chosen[n], with weights gate_up [2 I, D] and down [D, I]. Their outputs, weighted by
    shares[n], are added in float32 in the order of `chosen`. `chosen` is int32 [N, k], `shares` float32 [N, k].

    Raises:
        BadInput: shapes do not fit, or the compiled kernels are not in use.
    """
    fused = fused_path(x.device)
    if fused is None:
        raise refusal("mixture", "the compiled kernels", path_name(x.device), "compute expert by expert")
    check_chosen(x, gate_up, down, chosen, shares)
    return fused.mixture(x.contiguous(), gate_up, down, chosen.contiguous(), shares.contiguous())
