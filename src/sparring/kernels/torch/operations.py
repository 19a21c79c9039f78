"""Operations in plain torch that CPU and GPU share: elementwise and rowwise ones, and gradients.

Shapes as in `kernels.path`.
"""

from __future__ import annotations

import torch

from sparring.kernels.path import Angles, Heads, Norms, SavedLogprobs
from sparring.kernels.threads import one_thread, sum_rows


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum each row of [N, D] -> [N] by repeated halving, with elementwise additions only."""
    x = x.float()
    while x.shape[-1] > 1:
        half = -(-x.shape[-1] // 2)
        x = x[..., :half] + torch.nn.functional.pad(x[..., half:], (0, 2 * half - x.shape[-1]))
    return x[..., 0]


def elementwise_exp(x: torch.Tensor) -> torch.Tensor:
    """Compute exp in float64: torch's float32 exp computes the tail of a tensor differently."""
    return torch.exp(x.double()).float()


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + elementwise_exp(-x))


class TorchOperations:
    """Operations that torch computes in the same way on every device; base of `TorchPath` and `DevicePath`. Implements
    `KernelPath` in part."""

    def linear_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        with one_thread():
            return grad @ weight if needs[0] else None, grad.t() @ x if needs[1] else None

    def sum_rows(self, grad: torch.Tensor) -> torch.Tensor:
        return sum_rows(grad)

    def rms_norm_backward(
        self, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inverse, wide, g = self._inverse_rms(x, eps), x.float(), grad.float()
        pull = ((weight.float() * g) * wide).sum(-1, keepdim=True) / x.shape[-1]
        dx = inverse * (weight.float() * g) - wide * inverse**3 * pull
        return dx.to(x.dtype), sum_rows(g * wide * inverse).to(weight.dtype)

    @staticmethod
    def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
        return 1.0 / torch.sqrt(row_sum(x.float().square()) / x.shape[-1] + eps).unsqueeze(-1)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        y = gate.float() * _sigmoid(gate.float())
        return (y if up is None else y * up.float()).to(gate.dtype)

    def silu_mul_backward(
        self, gate: torch.Tensor, up: torch.Tensor | None, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        a, g = gate.float(), grad.float()
        s = _sigmoid(a)
        dup = None if up is None else (g * a * s).to(up.dtype)
        through = g if up is None else g * up.float()
        return (through * s * (1.0 + a * (1.0 - s))).to(gate.dtype), dup

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        """Compute tanh of float32 of any shape in float64, rounded once."""
        return torch.tanh(x.double()).float()

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        cos_a, cos_b = cos.float().unsqueeze(1).chunk(2, -1)
        sin_a, sin_b = sin.float().unsqueeze(1).chunk(2, -1)
        if transposed:
            return torch.cat((a * cos_a + b * sin_b, b * cos_b - a * sin_a), -1).to(x.dtype)
        return torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), -1).to(x.dtype)

    def add_rms_norm_backward(
        self, total: torch.Tensor, weight: torch.Tensor, grad_total: torch.Tensor | None, grad: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = self.rms_norm_backward(total, weight, grad, eps)
        return dx if grad_total is None else dx + grad_total, dw

    def split_heads_backward(
        self, qkv: torch.Tensor, angles: Angles, norms: Norms | None, grads: Heads
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        dq, dk = (self.rope(grad, *angles, True) for grad in grads[:2])
        if norms is None:
            return torch.cat([t.flatten(1) for t in (dq, dk, grads[2])], 1), None, None
        q, k, _ = separate_heads(qkv, dq.shape[1], dk.shape[1], dq.shape[2])
        (dq, dq_weight), (dk, dk_weight) = (
            self.rms_norm_backward(t.flatten(0, 1), w, g.flatten(0, 1), norms[2])
            for t, w, g in ((q, norms[0], dq), (k, norms[1], dk))
        )
        tokens = qkv.shape[0]
        return torch.cat([t.reshape(tokens, -1) for t in (dq, dk, grads[2])], 1), dq_weight, dk_weight

    def swiglu_backward(self, gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, 1)
        dgate, dup = self.silu_mul_backward(gate, up, grad)
        assert dup is not None  # as `up` is given
        return torch.cat((dgate, dup), 1)


def separate_heads(qkv: torch.Tensor, heads: int, kv_heads: int, size: int) -> list[torch.Tensor]:
    """Split qkv[N, (H + 2 G) d] into q[N, H, d], k, v[N, G, d], each contiguous."""
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)
    return [part.reshape(qkv.shape[0], -1, size).contiguous() for part in parts]


def logits_gradient(
    saved: SavedLogprobs, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of logits [N, V] without kept sets from the gradients of logprob and entropy [N]."""
    logits, targets, temperature, entropy, maximum, log_sum = saved
    inverse = (1.0 / torch.where(temperature == 0, 1.0, temperature)).unsqueeze(1)
    log_p = logits * inverse - (maximum + log_sum).unsqueeze(1)
    p = elementwise_exp(log_p)
    grad = -p * grad_logprob.unsqueeze(1)
    grad.scatter_add_(1, targets.unsqueeze(1), grad_logprob.unsqueeze(1))
    if grad_entropy is not None:
        grad -= p * (log_p.clamp(min=-1e30) + entropy.unsqueeze(1)) * grad_entropy.unsqueeze(1)
    return grad * inverse
