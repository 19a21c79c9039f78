"""Gradients of the linear operation on the compiled paths: the order of their sums, to the bit, and what lies oddly in
memory."""

from __future__ import annotations

import pytest
import torch

from sparring.kernels import ops
from sparring.kernels.paths import current

BLOCK, ROWS_PER_PARTIAL = 128, 64
NEEDS = (True, True)
COMPILED = pytest.mark.kernel_paths("exact-tiles", "exact-pairs", "exact-kernels")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Float32 numbers that bfloat16 has too: the product of two is exact, so that a fused step rounds where an addition
    does."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def ordered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[I, R], b[I, C] -> [R, C]: chains of 128 products, added in order."""
    total = None
    for block_a, block_b in zip(a.split(BLOCK), b.split(BLOCK), strict=True):
        chain = torch.zeros(a.shape[1], b.shape[1])
        for row_a, row_b in zip(block_a, block_b, strict=True):
            chain = chain + row_a.unsqueeze(1) * row_b
        total = chain if total is None else total + chain
    return total


@COMPILED
@pytest.mark.parametrize(("rows", "inputs", "outputs"), ((300, 70, 5), (5, 201, 300), (129, 1, 256), (1, 65, 1)))
def test_the_order_of_the_sums_in_float32(rows: int, inputs: int, outputs: int, path: str) -> None:
    x, weight, grad = random(rows, inputs), random(outputs, inputs, seed=1), random(rows, outputs, seed=2)
    dx, dw = current().linear_backward(x, weight, grad, NEEDS)
    if path == "exact-tiles":  # sums of its own: near, not equal
        torch.testing.assert_close(dx, grad @ weight, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(dw, grad.t() @ x, rtol=1e-5, atol=1e-4)
    else:
        assert torch.equal(dx, ordered(grad.t(), weight))
        assert torch.equal(dw, ordered(grad, x))


@COMPILED
@pytest.mark.parametrize("rows", (0, 1, 63, 64, 65, 200))
def test_the_order_of_sums_over_rows(rows: int, path: str) -> None:
    grad, expected = random(rows, 37), torch.zeros(37)
    for part in grad.split(ROWS_PER_PARTIAL):
        partial = torch.zeros(37)
        for row in part:
            partial = partial + row
        expected = expected + partial
    assert torch.equal(current().sum_rows(grad), expected)
    assert torch.equal(current().sum_rows(grad.bfloat16()), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_alignment_and_strides_change_no_bit(dtype: torch.dtype, path: str) -> None:
    """A few columns of a wider gradient, and a weight that is kept transposed."""
    x, weight, grad = (random(*shape, seed=9).to(dtype) for shape in ((50, 70), (33, 70), (50, 100)))
    part = grad[:, 20:53]
    expected = current().linear_backward(x, weight, part.contiguous(), NEEDS)
    found = current().linear_backward(x, weight.t().contiguous().t(), part, NEEDS)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(current().sum_rows(part), current().sum_rows(part.contiguous()))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_gradient_of_a_weight_that_no_row_meets_is_zero(dtype: torch.dtype, path: str) -> None:
    x, weight, bias = (random(*shape).to(dtype).requires_grad_() for shape in ((0, 70), (33, 70), (33,)))
    dx, dw, db = torch.autograd.grad(
        ops.linear(x, ops.pack(weight), bias), (x, weight, bias), torch.empty(0, 33, dtype=dtype)
    )
    assert dx.shape == (0, 70) and not dw.any() and not db.any()


@pytest.mark.parametrize("rows", (1, 2, 255, 256, 257, 1001))
def test_bfloat16_is_as_near_as_torch(rows: int, path: str) -> None:
    x, weight, grad = (random(*shape, seed=3).bfloat16() for shape in ((rows, 65), (300, 65), (rows, 300)))
    for ours, theirs, exact in zip(
        current().linear_backward(x, weight, grad, NEEDS),
        (grad @ weight, grad.t() @ x),
        (grad.double() @ weight.double(), grad.double().t() @ x.double()),
        strict=True,
    ):
        error, of_torch = ((found.double() - exact).square().mean().sqrt() for found in (ours, theirs))
        assert error <= 1.1 * of_torch
