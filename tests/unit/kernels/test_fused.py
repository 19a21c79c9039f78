"""Fused operations give the bits of the separate ones, for contiguous rows and for rows cut out of wider ones."""

from __future__ import annotations

import pytest
import torch

from sparring.errors import BadInput
from sparring.kernels import ops

DTYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("path")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 40, 160])
def test_a_sum_and_its_norm(width: int, dtype: torch.dtype) -> None:
    x, y, weight = (
        random(70, width, dtype=dtype),
        random(70, width, dtype=dtype, seed=1),
        random(width, dtype=dtype, seed=2),
    )
    total, normed = ops.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, ops.rms_norm(x + y, weight, 1e-6))
    assert all(
        torch.equal(a[3:8], b)
        for a, b in zip((total, normed), ops.add_rms_norm(x[3:8], y[3:8], weight, 1e-6), strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(5, 5, 32), (4, 2, 40), (3, 1, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_out_of_one_product(heads: int, kv_heads: int, size: int, normed: bool, dtype: torch.dtype) -> None:
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    wide = random(70, sum(sizes) + 9, dtype=dtype)[:, 2 : 2 + sum(sizes)]
    cos, sin = random(70, size, dtype=dtype, seed=1), random(70, size, dtype=dtype, seed=2)
    weights = [random(size, dtype=dtype, seed=3), random(size, dtype=dtype, seed=4)]
    q, k, v = (part.reshape(70, -1, size) for part in wide.split(sizes, 1))
    found = ops.split_heads(wide, cos, sin, (*weights, 1e-6) if normed else None, heads, kv_heads)
    if normed:
        q, k = (ops.rms_norm(t, weight, 1e-6) for t, weight in zip((q, k), weights, strict=True))
    expected = (ops.rope(q, cos, sin), ops.rope(k, cos, sin), v)
    assert all(a.is_contiguous() and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 37, 480])
def test_gate_and_up_out_of_one_product(width: int, dtype: torch.dtype) -> None:
    wide = (random(70, 2 * width + 5, dtype=dtype) * 4)[:, 3 : 3 + 2 * width]
    gate, up = wide.chunk(2, 1)
    assert torch.equal(ops.swiglu(wide), ops.silu_mul(gate, up))


def gradients_of_all() -> list[torch.Tensor]:
    x, y, weight = (t.requires_grad_() for t in (random(300, 48), random(300, 48, seed=1), random(48, seed=2)))
    total, normed = ops.add_rms_norm(x, y, weight, 1e-6)
    found = list(torch.autograd.grad((total * normed).sum(), (x, y, weight)))
    qkv, q_weight, k_weight = (
        t.requires_grad_() for t in (random(300, 6 * 32), random(32, seed=1), random(32, seed=2))
    )
    parts = ops.split_heads(qkv, random(300, 32, seed=3), random(300, 32, seed=4), (q_weight, k_weight, 1e-6), 4, 1)
    found += torch.autograd.grad(sum(part.square().sum() for part in parts), (qkv, q_weight, k_weight))
    return [*found, *torch.autograd.grad(ops.swiglu(qkv).square().sum(), (qkv,))]


def test_gradients_do_not_depend_on_the_thread_count() -> None:
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(gradients_of_all())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="add_rms_norm: expected"):
        ops.add_rms_norm(random(4, 16), random(5, 16), random(16), 1e-6)
    with pytest.raises(BadInput, match="split_heads: expected"):
        ops.split_heads(random(4, 64), random(4, 16), random(4, 16), None, 2, 2)
    with pytest.raises(BadInput, match="swiglu: expected"):
        ops.swiglu(random(4, 15))
