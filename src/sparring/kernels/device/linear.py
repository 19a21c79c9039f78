"""Matrix product on a GPU in which a row's bits depend on that row alone, in Triton.

Every product runs in tiles of one size, and its inputs are summed in parts, whose number depends on the weight's shape
alone. With few rows the parts are computed in parallel, so that the whole device reads the weight, and added
afterwards. With many rows they are computed one after another. Both ways add the same numbers in the same order.
Shapes: N rows, K inputs, M outputs, S parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

ROWS = 64
OUTPUTS = 64
PROGRAMS = 256
"""Programs that keep a large GPU busy. A constant, not a property of the device: the number of parts decides bits."""
LEAST_INPUTS = 256
"""Minimum number of inputs of a part."""
FEW_ROWS = 256
"""Maximum number of rows for which the parts are computed in parallel."""


def inputs_of_block(dtype: torch.dtype) -> int:
    """Return the number of inputs of one step of a product."""
    return 64 if dtype is torch.bfloat16 else 32


def num_parts(num_inputs: int, num_outputs: int) -> int:
    """Return the number of parts S for a weight [M, K], a power of two."""
    parts = 1
    while -(-num_outputs // OUTPUTS) * parts < PROGRAMS and num_inputs // (2 * parts) >= LEAST_INPUTS:
        parts *= 2
    return parts


def is_wide(dtype: torch.dtype) -> bool:
    """Return True if products multiply float32: for float32 inputs, and in the interpreter, which cannot multiply
    bfloat16. The product of two bfloat16 numbers is an exact float32, so this changes no value."""
    return dtype is torch.float32 or bool(knobs.runtime.interpret)


@triton.jit
def _product(
    x, weight, bias, y, N, M,
    K: tl.constexpr, LENGTH: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute PARTS parts of LENGTH inputs each for one tile: y[N, M], or y[S, N, M] with one part per program."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    at = tl.arange(0, INPUTS)
    x_rows = x + row[:, None] * K
    weight_rows = weight + output[None, :].to(tl.int64) * K
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for other in range(PARTS):
        begin = (part * PARTS + other) * LENGTH
        of_part = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for offset in range(0, LENGTH, INPUTS):
            k = begin + offset + at
            a = tl.load(x_rows + k[None, :], mask=(row[:, None] < N) & (k[None, :] < K), other=0.0)
            b = tl.load(weight_rows + k[:, None], mask=(output[None, :] < M) & (k[:, None] < K), other=0.0)
            if WIDE:
                a, b = a.to(tl.float32), b.to(tl.float32)
            of_part = tl.dot(a, b, of_part, input_precision="ieee")
        total += of_part
    if BIASED:
        total += tl.load(bias + output, mask=output < M, other=0.0).to(tl.float32)[None, :]
    valid = (row[:, None] < N) & (output[None, :] < M)
    tl.store(y + (part.to(tl.int64) * N + row[:, None]) * M + output[None, :], total.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _sum_of_parts(
    parts, bias, y, N, M, S: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum parts[S, N, M] float32 -> y[N, M]."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(S):
        total += tl.load(parts + (part * N + row) * M + output, mask=output < M, other=0.0)
    if BIASED:
        total += tl.load(bias + output, mask=output < M, other=0.0).to(tl.float32)
    tl.store(y + row * M + output, total.to(y.dtype.element_ty), mask=output < M)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, few_rows: int = FEW_ROWS
) -> torch.Tensor:
    """Multiply x[N, K] by weight[M, K] transposed, plus bias[M] -> [N, M] of `dtype`; all contiguous, x and weight of
    one dtype."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if rows == 0:
        return y
    parts, block = num_parts(inputs, outputs), inputs_of_block(x.dtype)
    length = -(-inputs // (parts * block)) * block
    tiles = (-(-rows // ROWS), -(-outputs // OUTPUTS))
    apart = parts > 1 and rows <= few_rows
    target = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device) if apart else y
    _product[(*tiles, parts if apart else 1)](
        x, weight, bias, target, rows, outputs,
        K=inputs, LENGTH=length, PARTS=1 if apart else parts, BIASED=bias is not None and not apart,
        WIDE=is_wide(x.dtype),
        ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=block, num_warps=4, num_stages=4, enable_fp_fusion=False,
    )  # fmt: skip
    if apart:
        grid = (rows, -(-outputs // 1024))
        _sum_of_parts[grid](
            target, bias, y, rows, outputs, S=parts, BIASED=bias is not None, BLOCK=1024, enable_fp_fusion=False
        )
    return y
