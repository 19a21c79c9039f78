"""Norms, heads and gates on a GPU, one Triton program per row: a row's bits depend on that row alone.

Fused, because at one token a kernel launch costs more than the arithmetic. Shapes: N rows, D width, H and G query and
key/value heads, d head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm(
    x, y, weight, total, out, D, eps, ADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    valid = at < D
    wide = tl.load(x + row + at, mask=valid, other=0.0).to(tl.float32)
    if ADDED:
        wide += tl.load(y + row + at, mask=valid, other=0.0).to(tl.float32)
        rounded = wide.to(x.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=valid)
        wide = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * inverse).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(x.dtype.element_ty), mask=valid)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + y (x itself if y is None) and its norm times weight[D]; x, y[N, D] contiguous."""
    out = torch.empty_like(x)
    total = x if y is None else torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0]:
        _add_norm[(x.shape[0],)](
            x, y, weight, total, out, x.shape[1], eps, ADDED=y is not None, BLOCK=block, enable_fp_fusion=False
        )
    return total, out


@triton.jit
def _split_heads(
    qkv, cos, sin, q_weight, k_weight, q, k, v, stride, eps,
    H: tl.constexpr, G: tl.constexpr, d: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    valid = at < d // 2
    kind = qkv.dtype.element_ty
    first = qkv + token * stride + head * d + at
    a = tl.load(first, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(first + d // 2, mask=valid, other=0.0).to(tl.float32)
    if head < H + G:
        if NORMED:
            inverse = 1.0 / tl.sqrt(tl.sum(a * a + b * b, 0) / d + eps)
            weight = (q_weight if head < H else k_weight) + at
            a = (a * inverse).to(kind).to(tl.float32) * tl.load(weight, mask=valid, other=0.0).to(tl.float32)
            b = (b * inverse).to(kind).to(tl.float32) * tl.load(weight + d // 2, mask=valid, other=0.0).to(tl.float32)
            a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        angles = token * d + at
        cos_a = tl.load(cos + angles, mask=valid, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + angles + d // 2, mask=valid, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + angles, mask=valid, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + angles + d // 2, mask=valid, other=0.0).to(tl.float32)
        turned = a * cos_a - b * sin_a
        b = b * cos_b + a * sin_b
        a = turned
    if head < H:
        target = q + (token * H + head) * d
    elif head < H + G:
        target = k + (token * G + head - H) * d
    else:
        target = v + (token * G + head - H - G) * d
    tl.store(target + at, a.to(kind), mask=valid)
    tl.store(target + d // 2 + at, b.to(kind), mask=valid)


def split_heads(
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv[N, (H + 2 G) d], its last dimension contiguous -> q[N, H, d], k, v[N, G, d]; q and k normalised and
    rotated."""
    tokens, size = angles[0].shape
    q, k, v = (
        torch.empty(tokens, count, size, dtype=qkv.dtype, device=qkv.device) for count in (heads, kv_heads, kv_heads)
    )
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    if tokens:
        _split_heads[(tokens, heads + 2 * kv_heads)](
            qkv, *angles, q_weight, k_weight, q, k, v, qkv.stride(0), eps,
            H=heads, G=kv_heads, d=size, NORMED=norms is not None, BLOCK=triton.next_power_of_2(size // 2),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k, v


@triton.jit
def _swiglu(gate_up, y, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = at < width
    gate = tl.load(gate_up + row * stride + at, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(y.dtype.element_ty), mask=valid)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up [N, I] of gate_up[N, 2 I], its last dimension contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _swiglu[(rows, -(-width // 1024))](gate_up, y, width, gate_up.stride(0), BLOCK=1024, enable_fp_fusion=False)
    return y
