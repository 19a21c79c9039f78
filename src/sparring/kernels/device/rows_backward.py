"""Gradients of norms, heads and gates on a GPU, in Triton: a program for a block of rows.

The gradient of a weight is summed over the rows of a block in their order, then over the blocks by torch. So its bits
depend on the number of rows, as on a CPU, and on nothing else.

Shapes: N rows, D width, H and G query and key/value heads, d head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparring.kernels.path import Angles, Heads, Norms

ROWS = 16
"""Rows of a block."""


@triton.jit
def _norm_backward(
    x, weight, grad, grad_total, dx, dweights, N, D, eps, ADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    w = tl.load(weight + at, mask=at < D, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for nth in range(ROWS):
        row = block * ROWS + nth
        valid = at < tl.where(row < N, D, 0)
        wide = tl.load(x + row * D + at, mask=valid, other=0.0).to(tl.float32)
        g = tl.load(grad + row * D + at, mask=valid, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
        pull = tl.sum(w * g * wide, 0) / D
        of_x = inverse * (w * g) - wide * (inverse * inverse * inverse * pull)
        if ADDED:
            of_x += tl.load(grad_total + row * D + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(dx + row * D + at, of_x.to(dx.dtype.element_ty), mask=valid)
        of_weight += g * wide * inverse
    tl.store(dweights + block * D + at, of_weight, mask=at < D)


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float, grad_total: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x[N, D], plus `grad_total` if given, and of weight[D] from the norm's gradient [N, D]."""
    x, grad = x.contiguous(), grad.contiguous()
    rows, width = x.shape
    dx, blocks = torch.empty_like(x), -(-rows // ROWS)
    dweights = torch.empty(blocks, width, dtype=torch.float32, device=x.device)
    if rows:
        total = grad if grad_total is None else grad_total.contiguous()
        _norm_backward[(blocks,)](
            x, weight, grad, total, dx, dweights, rows, width, eps,
            ADDED=grad_total is not None, ROWS=ROWS, BLOCK=triton.next_power_of_2(width),
            num_warps=1 if width <= 256 else 8, enable_fp_fusion=False,
        )  # fmt: skip
    return dx, dweights.sum(0).to(weight.dtype)


@triton.jit
def _split_heads_backward(
    qkv, cos, sin, q_weight, k_weight, dq, dk, dv, out, dweights, N, stride, eps,
    H: tl.constexpr, G: tl.constexpr, d: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    half = d // 2
    of_a, of_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for nth in range(ROWS):
        token = block * ROWS + nth
        valid = at < tl.where(token < N, half, 0)
        if head < H:
            source = dq + (token * H + head) * d
        elif head < H + G:
            source = dk + (token * G + head - H) * d
        else:
            source = dv + (token * G + head - H - G) * d
        a = tl.load(source + at, mask=valid, other=0.0).to(tl.float32)
        b = tl.load(source + half + at, mask=valid, other=0.0).to(tl.float32)
        if head < H + G:
            angles = token * d + at
            cos_a = tl.load(cos + angles, mask=valid, other=0.0).to(tl.float32)
            cos_b = tl.load(cos + angles + half, mask=valid, other=0.0).to(tl.float32)
            sin_a = tl.load(sin + angles, mask=valid, other=0.0).to(tl.float32)
            sin_b = tl.load(sin + angles + half, mask=valid, other=0.0).to(tl.float32)
            turned = a * cos_a + b * sin_b
            b = b * cos_b - a * sin_a
            a = turned
            if NORMED:
                first = qkv + token * stride + head * d + at
                x_a = tl.load(first, mask=valid, other=0.0).to(tl.float32)
                x_b = tl.load(first + half, mask=valid, other=0.0).to(tl.float32)
                weight = (q_weight if head < H else k_weight) + at
                w_a = tl.load(weight, mask=at < half, other=0.0).to(tl.float32)
                w_b = tl.load(weight + half, mask=at < half, other=0.0).to(tl.float32)
                inverse = 1.0 / tl.sqrt(tl.sum(x_a * x_a + x_b * x_b, 0) / d + eps)
                pull = inverse * inverse * inverse * (tl.sum(w_a * a * x_a + w_b * b * x_b, 0) / d)
                of_a += a * x_a * inverse
                of_b += b * x_b * inverse
                a = inverse * (w_a * a) - x_a * pull
                b = inverse * (w_b * b) - x_b * pull
        target = out + token * ((H + 2 * G) * d) + head * d + at
        tl.store(target, a.to(out.dtype.element_ty), mask=valid)
        tl.store(target + half, b.to(out.dtype.element_ty), mask=valid)
    if NORMED and head < H + G:
        summed = dweights + (block * (H + G) + head) * d + at
        tl.store(summed, of_a, mask=at < half)
        tl.store(summed + half, of_b, mask=at < half)


def split_heads_backward(
    qkv: torch.Tensor, angles: Angles, norms: Norms | None, grads: Heads
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of qkv[N, (H + 2 G) d] and of the norms' weights [d] from `grads`, of q[N, H, d], k, v[N, G,
    d]."""
    dq, dk, dv = (grad.contiguous() for grad in grads)
    (tokens, heads, size), kv_heads = dq.shape, dk.shape[1]
    out = torch.empty(tokens, (heads + 2 * kv_heads) * size, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    blocks = -(-tokens // ROWS)
    count = heads + kv_heads if norms else 0
    dweights = torch.empty(blocks, count, size, dtype=torch.float32, device=qkv.device)
    if tokens:
        _split_heads_backward[(blocks, heads + 2 * kv_heads)](
            qkv, *angles, q_weight, k_weight, dq, dk, dv, out, dweights, tokens, qkv.stride(0), eps,
            H=heads, G=kv_heads, d=size, NORMED=norms is not None, ROWS=ROWS,
            BLOCK=triton.next_power_of_2(size // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    if norms is None:
        return out, None, None
    of_q, of_k = dweights.split([heads, kv_heads], 1)
    return out, of_q.sum((0, 1)).to(norms[0].dtype), of_k.sum((0, 1)).to(norms[1].dtype)


@triton.jit
def _swiglu_backward(gate_up, grad, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < width
    gate = tl.load(gate_up + row * stride + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + at, mask=valid, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = g * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out + row * 2 * width + at, of_gate.to(out.dtype.element_ty), mask=valid)
    tl.store(out + row * 2 * width + width + at, (g * gate * share).to(out.dtype.element_ty), mask=valid)


def swiglu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of gate_up[N, 2 I], its last dimension contiguous, from `grad`, of silu(gate) * up [N, I]."""
    rows, width = grad.shape
    out = torch.empty(rows, 2 * width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, -(-width // 1024))
        _swiglu_backward[grid](
            gate_up, grad.contiguous(), out, width, gate_up.stride(0), BLOCK=1024, enable_fp_fusion=False
        )
    return out
