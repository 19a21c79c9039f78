"""What stands between our modules goes row by row: an element's bits at every place, a row's in every batch; what
nobody knows is noted."""

import pytest
import torch
from refusals import refused_at
from suite import short_of
from torch.nn import functional

from sparring.kernels import ops
from sparring.model.layers import RowLinear
from sparring.model.rowwise import RowWise, row_invariant

DTYPES = [torch.float32, torch.bfloat16]
OF_ONE = {
    "sigmoid": torch.sigmoid,
    "F.sigmoid": functional.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "tanh gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": lambda x: torch.log(x * x + 0.5),
    "erf": torch.erf,
    "softplus": lambda x: functional.softplus(x, beta=2.0),
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "pow": lambda x: (x * x + 0.1) ** 1.7,
    "sin": torch.sin,
    "expm1": torch.expm1,
    "relu squared": lambda x: torch.relu(x).square(),
    "sqrt": lambda x: torch.sqrt(x * x + 0.1),
    "reciprocal": lambda x: torch.reciprocal(x * x + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.1),
    "division": lambda x: 1.0 / (1.0 + x * x),
}


def turned(x):
    """As DeepSeek-V2 turns its heads, by numbers that are not of length 1."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return (
        torch.view_as_real(pairs * torch.view_as_complex(torch.linspace(-1.0, 1.0, x.shape[-1]).view(-1, 2)))
        .flatten(-2)
        .to(x.dtype)
    )


OF_ROWS = {
    "turn": turned,
    "sum": lambda x: x.sum(-1, keepdim=True),
    "sum in the middle": lambda x: x.view(len(x), 4, -1).sum(dim=1),
    "turn by one": lambda x: (
        torch.view_as_real(0.3 * torch.view_as_complex(x.float().view(len(x), -1, 2)) * (1 + 2j))
        .flatten(-2)
        .to(x.dtype)
    ),
    "mean": lambda x: x.mean(dim=-1, keepdim=True),
    "mean of squares": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "F.softmax": lambda x: functional.softmax(x, -1, dtype=torch.float32),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-5),
    "linear": lambda x: functional.linear(x, torch.linspace(-1, 1, 7 * x.shape[1]).view(7, -1).to(x.dtype)),
    "topk": lambda x: x.topk(5, -1)[0],
    "gather": lambda x: x.gather(-1, x.argsort(-1)[:, :3]),
}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", short_of(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("name", OF_ONE)
def test_an_element_has_the_same_bits_at_every_position(name, dtype):
    function, x = OF_ONE[name], 3.0 * random(150_001, dtype=dtype)
    with RowWise() as mode:
        expected = torch.cat([function(piece) for piece in x[:300].split(1)])
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            for size in (*range(1, 10), *range(15, 18), *range(31, 34), *range(63, 66), 79, 131, 300):
                assert torch.equal(function(x[:size]), expected[:size])
            assert torch.equal(function(x)[:300], expected)
            assert torch.equal(function(x.roll(149_777))[149_777:][:224], expected[:224])
    assert not mode.unknown
    if dtype is torch.float32:
        torch.testing.assert_close(expected.double(), function(x[:300].double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 36, 100, 1040])
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_row_is_the_same_alone_and_among_others(name, width, dtype):
    function, x = OF_ROWS[name], random(140, width, dtype=dtype)
    with RowWise() as mode:
        expected = torch.cat([function(row) for row in x.split(1)])
        for count in (1, 3):
            torch.set_num_threads(count)
            for part in (slice(0, 140), slice(3, 5), slice(9, 50), slice(17, 97)):
                assert torch.equal(function(x[part]), expected[part])
    assert not mode.unknown
    if dtype is torch.float32:
        torch.testing.assert_close(expected.double(), function(x.double()).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["sigmoid", "gelu", "mean of squares", "softmax", "sum in the middle", "linear", "turn"]
)
def test_gradients_are_those_of_the_function(name):
    function = {**OF_ONE, **OF_ROWS}[name]
    x, exact = random(9, 300).requires_grad_(), random(9, 300).double().requires_grad_()
    with RowWise():
        found = function(x)
    slope = random(*found.shape, seed=1)
    found.backward(slope)
    function(exact).backward(slope.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_unknown_functions_are_recorded():
    a, b = random(3, 4, 5), random(3, 5, 4)
    with RowWise() as mode:
        torch.bmm(a, b)
        a @ b
        torch.einsum("abc,acd->abd", a, b)
        a.sum()
        a.cumsum(-1)
        torch.view_as_complex(a[..., :4].contiguous().view(3, 4, 2, 2)) / 1j
        torch.pow(a.abs(), a)
        functional.linear(a.double(), b[0].t().double())
    assert mode.unknown == {"bmm", "matmul", "einsum", "sum", "cumsum", "div", "pow", "linear"}


def test_a_new_unknown_function_is_refused_after_the_proof():
    mode = RowWise()
    mode.is_proven = True
    a = random(3, 4)
    with mode, refused_at("exact numerics", "cumsum"):
        torch.sigmoid(a).sum(-1)
        a.cumsum(-1)


def test_safe_functions_with_summing_keywords_are_unknown():
    a, index = random(3, 4), torch.zeros(3, 4, dtype=torch.int64)
    with RowWise() as mode:
        torch.add(a, a), a.add_(a), a.scatter(0, index, a), torch.relu_(a)
        assert mode.unknown == set()
        torch.add(a, a, alpha=0.3)
        a.abs().sigmoid_()
        functional.silu(a.clone(), inplace=True)
        a.index_put_((index[0, :3],), a[0].clone(), accumulate=True)
    assert mode.unknown == {"add", "sigmoid_", "silu", "index_put_"}


def test_real_products_keep_their_bits_next_to_complex_ones():
    a = random(3, 4)
    with RowWise() as mode:
        z = torch.view_as_complex(a.view(3, 2, 2))
        a.clone().mul_(2.0).div_(3.0), a * a, a.square(), torch.mul(input=a, other=a)
        assert mode.unknown == set()
        torch.mul(input=z, other=z)
    assert mode.unknown == {"mul"}


def test_functions_without_numeric_results_are_ignored():
    a = random(3, 4)
    with RowWise() as mode:
        (
            a.shape,
            a.mT,
            a.device,
            a.argmax(),
            (a > 0).all(),
            a.ne(0).sum(),
            torch.arange(3).cumsum(0),
            torch.bincount(torch.arange(3)),
        )
        a[1:2, ..., None].expand(1, 4, 2).reshape(-1)[::2].clone()
        functional.dropout(a, 0.5, training=False)
    assert mode.unknown == set()


@pytest.mark.usefixtures("kernel_path")
def test_our_own_code_is_left_alone():
    """What our modules call is row-invariant by itself, and may be what is replaced elsewhere."""
    linear = torch.nn.Linear(8, 4)
    x = random(3, 8)
    expected = RowLinear(linear)(x)
    with RowWise() as mode:
        assert torch.equal(RowLinear(linear)(x), expected)
        product = row_invariant(lambda: x @ x.t())()
        torch.bmm(x[None], x.t()[None])
    assert torch.equal(product, x @ x.t()) and mode.unknown == {"bmm"}


@pytest.mark.usefixtures("kernel_path")
def test_a_weight_that_is_no_modules_goes_through_the_packed_product():
    x, weight, bias = random(2, 5, 8), random(4, 8, seed=1), random(4, seed=2)
    with RowWise():
        found = functional.linear(x, weight, bias)
    assert torch.equal(found.view(10, 4), ops.linear(x.view(10, 8), ops.pack(weight), bias))
