"""Routing and experts in one call: a row's own, to the bit those of the products one by one; values and gradients are
the softmax's."""

import pytest
import torch
from refusals import refused_at

from sparring.errors import BadInput
from sparring.kernels import ops
from sparring.kernels.compiled.library import COMPILED

DTYPES = [torch.float32, torch.bfloat16]

compiled = pytest.mark.kernel_paths(*COMPILED)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(1, 1), (6, 2), (16, 16), (40, 17), (129, 8)])
def test_shares_are_the_softmax_of_the_likeliest(path: str, experts: int, count: int, renormalised: bool) -> None:
    logits = 3.0 * random(200, experts)
    chosen, shares = ops.route(logits, count, renormalised=renormalised)
    expected, best = logits.double().softmax(-1).topk(count, -1)
    if renormalised:
        expected /= expected.sum(-1, keepdim=True)
    assert torch.equal(chosen.long(), best) and chosen.dtype is torch.int32
    torch.testing.assert_close(shares.double(), expected, rtol=1e-6, atol=0.0)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for part in (slice(3, 4), slice(70, 141)):
            ours = ops.route(logits[part], count, renormalised=renormalised)
            assert torch.equal(ours[0], chosen[part]) and torch.equal(ours[1], shares[part])


@compiled
def test_of_equal_experts_the_lowest_come_first(path: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 6, [-torch.inf] * 5 + [0.0]])
    chosen, shares = ops.route(logits, 4, renormalised=True)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [5, 0, 1, 2]]
    assert shares[1:].tolist() == [[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]


@compiled
def test_nan_logits_choose_existing_experts(path: str) -> None:
    logits = random(40, 9)
    logits[::2, ::2] = torch.nan
    chosen, _ = ops.route(logits, 5, renormalised=True)
    assert all(len(set(row)) == 5 and set(row) <= set(range(9)) for row in chosen.tolist())


@pytest.mark.parametrize("renormalised", [True, False])
def test_gradients_are_the_softmaxs(path: str, renormalised: bool) -> None:
    ours, exact = random(30, 12).requires_grad_(), random(30, 12).double().requires_grad_()
    slope = random(30, 5, seed=1)
    _, shares = ops.route(ours, 5, renormalised=renormalised)
    shares.backward(slope)
    expected, _ = exact.softmax(-1).topk(5, -1)
    (expected / expected.sum(-1, keepdim=True) if renormalised else expected).backward(slope.double())
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def one_by_one(
    x: torch.Tensor, weights: list[list[torch.Tensor]], chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Row by row and choice by choice."""
    rows = []
    for row, numbers, parts in zip(x.split(1), chosen.tolist(), shares.split(1), strict=True):
        total = torch.zeros(0)
        for number, share in zip(numbers, parts[0], strict=True):
            gate_up, down = (ops.pack(kind[number]) for kind in weights)
            term = ops.linear(ops.swiglu(ops.linear(row, gate_up)), down).float() * share
            total = total + term if len(total) else term
        rows.append(total.to(x.dtype))
    return torch.cat(rows)


@compiled
@pytest.mark.parametrize(("width", "inner"), [(64, 32), (48, 20), (65, 130), (7, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_is_its_products_one_by_one(path: str, dtype: torch.dtype, width: int, inner: int) -> None:
    weights = [
        [random(*shape, dtype=dtype, seed=e) for e in range(7)] for shape in ((2 * inner, width), (width, inner))
    ]
    x = random(40, width, dtype=dtype, seed=9)
    chosen, shares = ops.route(random(40, 7, seed=2), 3, renormalised=True)
    chosen[:9], chosen[20:] = (
        torch.tensor([4, 2, 5]),
        torch.tensor([2, 4, 0]),
    )  # one that nobody has, some that many have
    expected = one_by_one(x, weights, chosen, shares)
    stacks = [ops.PackedStack(kind) for kind in weights]
    for threads in (1, 2, 3, 9):
        torch.set_num_threads(threads)
        for part in (slice(0, 40), slice(0, 1), slice(11, 13), slice(20, 40), slice(0, 0)):
            assert torch.equal(ops.mixture(x[part], *stacks, chosen[part], shares[part]), expected[part])


@compiled
def test_a_large_mixture_is_divided_among_threads_with_the_same_bits(path: str) -> None:
    """Large enough that several threads take part."""
    weights = [[random(*shape, seed=e) for e in range(3)] for shape in ((512, 256), (256, 256))]
    x, stacks = random(300, 256, seed=9), [ops.PackedStack(kind) for kind in weights]
    chosen, shares = ops.route(random(300, 3, seed=2), 2, renormalised=False)
    torch.set_num_threads(1)
    alone = ops.mixture(x, *stacks, chosen, shares)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        assert torch.equal(ops.mixture(x, *stacks, chosen, shares), alone)
        assert torch.equal(ops.mixture(x[:3], *stacks, chosen[:3], shares[:3]), alone[:3])


@compiled
def test_many_rows_go_in_blocks_with_the_same_bits(path: str) -> None:
    """So that what stands between their products does not grow with them."""
    weights = [[random(*shape, seed=e) for e in range(4)] for shape in ((2048, 64), (64, 1024))]
    x, stacks = random(5000, 64, seed=9), [ops.PackedStack(kind) for kind in weights]
    chosen, shares = ops.route(random(5000, 4, seed=2), 2, renormalised=True)
    whole = ops.mixture(x, *stacks, chosen, shares)
    for rows in (slice(0, 7), slice(2540, 2600), slice(4990, 5000)):
        assert torch.equal(ops.mixture(x[rows], *stacks, chosen[rows], shares[rows]), whole[rows])


@compiled
def test_changed_and_replaced_weights_are_read(path: str) -> None:
    weights = [[random(*shape, seed=e) for e in range(4)] for shape in ((16, 8), (8, 8))]
    stacks = [ops.PackedStack(kind) for kind in weights]
    x, (chosen, shares) = random(5, 8), ops.route(random(5, 4, seed=2), 2, renormalised=True)
    before = ops.mixture(x, *stacks, chosen, shares)
    doubled = [weight * 2.0 for weight in weights[1]]
    changes = stacks[1].changes(doubled)
    assert torch.equal(ops.mixture(x, *stacks, chosen, shares), before)
    for owner, name, value in changes:
        setattr(owner, name, value)
    assert torch.equal(ops.mixture(x, *stacks, chosen, shares), 2.0 * before)
    assert all(
        torch.equal(ops.linear(x, one), ops.linear(x, ops.pack(weight)))
        for one, weight in zip(stacks[1].matrices, doubled, strict=True)
    )
    stacks[1].update(weights[1])
    assert torch.equal(ops.mixture(x, *stacks, chosen, shares), before)


@compiled
def test_mixture_shapes_that_do_not_fit_are_refused(path: str) -> None:
    gate_up, down = (ops.PackedStack([random(*shape)] * 3) for shape in ((20, 8), (8, 10)))
    x, chosen, shares = random(4, 8), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    ops.mixture(x, gate_up, down, chosen, shares)
    for odd, match in (
        ((random(4, 7), gate_up, down, chosen, shares), r"x\[N, 8\] torch.float32"),
        ((x, gate_up, gate_up, chosen, shares), r"3 weights \[8, 10\]"),
        ((x, gate_up, ops.PackedStack([random(8, 10)] * 2), chosen, shares), r"got \[2, 8, 10\]"),
        ((x, gate_up, down, chosen[:3], shares), r"chosen \[4, k\] int32"),
        ((x, gate_up, down, chosen.long(), shares), r"chosen \[4, k\] int32"),
        ((x, gate_up, down, chosen, shares[:, :1]), r"chosen \[4, k\] int32"),
        ((x, gate_up, down, chosen + 3, shares), "experts below 3"),
        ((x, gate_up, down, chosen - 1, shares), "experts below 3"),
    ):
        with pytest.raises(BadInput, match=match):
            ops.mixture(*odd)
    for count in (0, 7):
        with refused_at("route", "1 to 6 experts of a row"):
            ops.route(random(4, 6), count, renormalised=True)
    with refused_at("route", "logits"):
        ops.route(random(4, 6).double(), 2, renormalised=True)


@pytest.mark.kernel_paths("best")
def test_without_compiled_kernels_a_mixture_is_refused(path: str) -> None:
    stacks = [ops.PackedStack([random(*shape)] * 3) for shape in ((20, 8), (8, 10))]
    ops.use("exact-torch")
    with refused_at("mixture", "the compiled kernels"):
        ops.mixture(random(4, 8), *stacks, torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2))
