"""Matrix products of awkward shapes: a row's bits at every row count, several weights as one, gradients, what is
empty."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sparring.errors import BadInput
from sparring.kernels import ops

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((37, 1), (331, 650), (1, 70), (95, 97))
"""(inputs, outputs): no tile and no vector comes out even; the second is large enough for several threads at any row
count."""

pytestmark = pytest.mark.usefixtures("path")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_every_company_of_up_to_seventy(
    inputs: int, outputs: int, dtype: torch.dtype, path: str
) -> None:
    packed, bias = ops.pack(random(outputs, inputs, dtype=dtype)), random(outputs, dtype=dtype, seed=1)
    x = random(70, inputs, dtype=dtype, seed=2)
    torch.set_num_threads(1)
    alone = torch.cat([ops.linear(row, packed, bias) for row in x.split(1)])
    counts = range(1, 71) if path != "exact-torch" else (2, 15, 16, 17, 33, 70)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        changed = [n for n in counts if not torch.equal(ops.linear(x[70 - n :], packed, bias), alone[70 - n :])]
        assert changed == [], f"{threads} threads"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [(1,), (0, 3, 0, 250, 1, 7, 0), (0, 2), (0, 0)])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_weights_in_one_call_are_those_of_each(
    inputs: int, outputs: int, dtype: torch.dtype, counts: tuple[int, ...], biased: bool
) -> None:
    weights = [random(outputs, inputs, dtype=dtype, seed=e) for e in range(len(counts))]
    packed = ops.PackedStack(weights)
    x, biases = (
        random(sum(counts), inputs, dtype=dtype, seed=9),
        random(len(counts), outputs, dtype=dtype, seed=8) if biased else None,
    )
    parts = zip(
        x.split(counts), map(ops.pack, weights), [None] * len(counts) if biases is None else biases, strict=True
    )
    expected = torch.cat([ops.linear(part, weight, bias) for part, weight, bias in parts])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ops.linear_groups(x, packed, biases, torch.tensor(counts)), expected)


def test_rows_that_do_not_fit_several_weights_are_refused() -> None:
    packed, x, counts = ops.PackedStack([random(5, 8), random(5, 8, seed=1)]), random(3, 8), torch.tensor([1, 2])
    for odd in (random(3, 7), random(3, 8, dtype=torch.bfloat16)):
        with pytest.raises(BadInput, match=r"x\[N, 8\] torch.float32"):
            ops.linear_groups(odd, packed, None, counts)
    with pytest.raises(BadInput, match="matrices of one shape and dtype"):
        ops.PackedStack([random(5, 8), random(6, 8)])
    with pytest.raises(BadInput, match=r"biases \[2, 5\]"):
        ops.linear_groups(x, packed, random(5), counts)
    for odd in (
        torch.tensor([1, 3]),
        torch.tensor([4, -1]),
        torch.tensor([3]),
        torch.tensor([1, 2], dtype=torch.int32),
    ):
        with pytest.raises(BadInput, match="2 int64 counts that sum to 3"):
            ops.linear_groups(x, packed, None, odd)


@pytest.mark.parametrize("rows", [1, 6, 7, 40, 300])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_bfloat16_weight_gives_the_bits_of_its_float32(inputs: int, outputs: int, rows: int, path: str) -> None:
    """It is kept in half the bytes; on tiles and of pairs the two are products of their own."""
    weight, x = random(outputs, inputs, dtype=torch.bfloat16), random(rows, inputs, dtype=torch.bfloat16, seed=1)
    narrow, wide = ops.pack(weight), ops.pack(weight.float())
    if path == "exact-kernels":
        assert torch.equal(ops.linear(x, narrow), ops.linear(x.float(), wide).to(torch.bfloat16))
        assert narrow.storage.nbytes * 2 == wide.storage.nbytes
    else:
        assert torch.allclose(ops.linear(x, narrow).float(), ops.linear(x.float(), wide), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (901, 130)])
def test_sums_of_bfloat16_pairs_have_the_documented_order(inputs: int, outputs: int, rows: int, path: str) -> None:
    """The product of two bfloat16 is a float32, so that each fused step rounds once, and plain additions make the same
    bits."""
    x, weight = random(rows, inputs, dtype=torch.bfloat16), random(outputs, inputs, dtype=torch.bfloat16, seed=1)
    bias = random(outputs, seed=2)
    found = ops.linear(x, ops.pack(weight), bias, torch.float32)
    block, group = {"exact-pairs": (256, 2)}.get(path, (128, 1))
    expected = torch.zeros(rows, outputs)
    for begin in range(0, inputs, block):
        total = torch.zeros(rows, outputs)
        for k in range(begin, min(begin + block, inputs), group):
            for one in reversed(range(k, min(k + group, inputs))):
                total = total + x[:, one : one + 1].float() * weight[:, one].float()
        expected = expected + total
    same = torch.equal if path in ("exact-pairs", "exact-kernels") else partial(torch.allclose, rtol=1e-4, atol=1e-4)
    assert same(found, expected + bias)


def test_numbers_too_small_for_their_exponent_are_zero_to_pairs_alone(path: str) -> None:
    """A bfloat16 below 2^-126, times one."""
    x, weight = torch.full((1, 2), 2.0**-130, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)
    (found,) = ops.linear(x, ops.pack(weight), None, torch.float32).flatten().tolist()
    assert found == (0.0 if path in ("exact-pairs", "exact-tiles") else 2.0**-129) or path == "exact-torch"


def test_float32_on_pairs_has_the_bits_of_every_processor(path: str) -> None:
    x, weight = random(40, 901), random(130, 901, seed=1)
    found = ops.linear(x, ops.pack(weight))
    ops.use("exact-kernels")
    same = torch.equal if path in ("exact-pairs", "exact-kernels") else partial(torch.allclose, rtol=1e-4, atol=1e-4)
    assert same(found, ops.linear(x, ops.pack(weight)))


@pytest.mark.parametrize("counts", [(70, 1, 33), (64, 128, 33)], ids=["odd", "whole panels"])
@pytest.mark.parametrize("rows", [3, 40, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_joined_in_one_product_keep_the_bits_of_their_own(
    rows: int, dtype: torch.dtype, counts: tuple[int, ...], path: str
) -> None:
    """On the compiled paths; plain torch picks its product by the number of outputs, and only the values agree."""
    weights = [random(outputs, 95, dtype=dtype, seed=outputs) for outputs in counts]
    x = random(rows, 95, dtype=dtype, seed=1)
    apart = torch.cat([ops.linear(x, ops.pack(weight)) for weight in weights], 1)
    joined = ops.linear(x, ops.pack(*weights))
    assert torch.equal(joined, apart) if path != "exact-torch" else torch.allclose(joined, apart, rtol=1e-2, atol=1e-4)


def gradients(x: torch.Tensor, weights: list[torch.Tensor], slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    return torch.autograd.grad(ops.linear(leaves[0], ops.pack(*leaves[1:])), leaves, slope)


@pytest.mark.parametrize("rows", [1, 31, 33, 600, 1411])
@pytest.mark.parametrize("inputs", [150, 700])
def test_gradients_are_right_and_repeat_on_any_number_of_threads(rows: int, inputs: int, path: str) -> None:
    """Right: within 4e-6 of the sum of the magnitudes of an entry's terms. On tiles also with the threads; torch may
    differ. Fewer inputs than the 207 outputs, and so many more that a gradient of the weight takes several tasks."""
    x, weights, slope = (
        random(rows, inputs),
        [random(77, inputs, seed=1), random(130, inputs, seed=2)],
        random(rows, 207, seed=3),
    )
    found = []
    for threads in (1, 1, 2, 3):
        torch.set_num_threads(threads)
        dx, *dw = gradients(x, weights, slope)
        found.append((dx, torch.cat(dw)))
    joined = torch.cat(weights)
    for ours, a, b in zip(found[0], (slope, slope.t()), (joined, x), strict=True):
        terms = a.double().abs() @ b.double().abs()
        assert bool(((ours - a.double() @ b.double()).abs() <= 4e-6 * terms).all())
    again = found[1:] if path == "exact-tiles" else found[1:2]
    assert all(torch.equal(a, b) for other in again for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_does_not_write_neighbouring_rows(dtype: torch.dtype) -> None:
    """What a block of rows holds beyond the last one must not enter: the same gradient with and without rows of slope
    zero."""
    x, weight, slope = (
        random(50, 70, dtype=dtype),
        random(40, 70, dtype=dtype, seed=1),
        random(50, 40, dtype=dtype, seed=2),
    )
    slope[33:] = 0
    dx, dw = gradients(x, [weight], slope)
    less_dx, less_dw = gradients(x[:33], [weight], slope[:33])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    assert float((dw - less_dw).abs().max()) <= tolerance and float((dx[:33] - less_dx).abs().max()) <= tolerance
    assert not dx[33:].any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nans_reach_the_gradients(value: float) -> None:
    x, weight, slope = random(70, 45), random(50, 45, seed=1), random(70, 50, seed=2)
    slope[40, 49] = value
    dx, dw = gradients(x, [weight], slope)
    assert not dx[40].isfinite().any() and dx[:40].isfinite().all() and dx[41:].isfinite().all()
    assert not dw[49].isfinite().any() and dw[:49].isfinite().all()
    x[69, 44], slope[40, 49] = value, 1.0
    dx, dw = gradients(x, [weight], slope)
    assert dx.isfinite().all() and not dw[:, 44].isfinite().any() and dw[:, :44].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_expanded_slopes(dtype: torch.dtype) -> None:
    wide, weight = random(40, 300, dtype=dtype), random(50, 90, dtype=dtype, seed=1)
    for view in (wide[:, 7:97], wide[::3, 7:97], wide.t()[7:97].t(), wide[1:2, 3:93]):
        same = view.contiguous()
        assert torch.equal(ops.linear(view, ops.pack(weight)), ops.linear(same, ops.pack(weight)))
        slope = torch.ones((), dtype=dtype).expand(len(view), 50)
        pairs = zip(gradients(view, [weight], slope), gradients(same, [weight], slope.contiguous()), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-5 if dtype is torch.float32 else 2e-2) for a, b in pairs)
    strided = random(90, 50, dtype=dtype, seed=1).t()
    assert torch.equal(ops.pack(strided).storage, ops.pack(strided.contiguous()).storage)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_at_all(dtype: torch.dtype) -> None:
    x, weight = torch.empty(0, 40, dtype=dtype), random(50, 40, dtype=dtype)
    assert ops.linear(x, ops.pack(weight)).shape == (0, 50)
    dx, dw = gradients(x, [weight], torch.empty(0, 50, dtype=dtype))
    assert dx.shape == x.shape and dw.shape == weight.shape and not dw.any()


@pytest.mark.parametrize("outputs", [6, 48, 97])
def test_gradients_of_few_rows_are_the_same_bits_with_any_number_of_threads(outputs: int) -> None:
    """Torch alone makes others with each."""
    weight, slope, x = random(outputs, 48), random(24, outputs, seed=1), random(24, 48, seed=2)
    for rows in range(1, 25):
        torch.set_num_threads(1)
        once = gradients(x[:rows], [weight], slope[:rows])
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            found = gradients(x[:rows], [weight], slope[:rows])
            assert all(map(torch.equal, found, once)), f"{rows} rows, {threads} threads"
