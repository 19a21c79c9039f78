"""The device path's operations: values as in float64 or in plain torch, and the bits of a row whatever stands beside
it."""

import pytest
import torch

from sparring.kernels import ops
from sparring.kernels.attention_scores import AttentionForm
from sparring.kernels.device.path import DevicePath, is_interpreted
from sparring.kernels.torch.path import TorchPath

pytestmark = pytest.mark.gpu

INTERPRETED = is_interpreted()

# the interpreter cuts a float32 off where a device rounds it to bfloat16
ULP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8}
COUNTS = [1, 2, 3, 17, 63, 64, 65, 130] if INTERPRETED else [*range(1, 301), 512, 1000]
SHAPES = [(40, 24), (256, 130), (2060, 70)]
SHAPES += [] if INTERPRETED else [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936), (4096, 6144)]
LENGTHS = [5, 1, 70, 90]
FORMS = [AttentionForm(0.2), AttentionForm(0.2, window=9), AttentionForm(0.5, cap=2.0)]


def on(device, *tensors):
    return tuple(None if t is None else t.to(device) for t in tensors)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_a_product_has_its_bits_at_every_number_of_rows(device, shape, dtype):
    inputs, outputs = shape
    torch.manual_seed(0)
    x, weight, bias = on(device, torch.randn(max(COUNTS), inputs), torch.randn(outputs, inputs), torch.randn(outputs))
    x, packed = x.to(dtype), ops.pack(weight.to(dtype))
    whole = ops.linear(x, packed, bias, torch.float32)
    exact = x.double() @ weight.to(dtype).double().t() + bias
    assert (whole - exact).abs().max() <= 1e-6 * inputs**0.5 * exact.std() * 4
    for count in COUNTS:
        assert torch.equal(ops.linear(x[:count], packed, bias, torch.float32), whole[:count]), count
    shifted = ops.linear(x[-7:], packed, bias, torch.float32)
    assert torch.equal(shifted, whole[-7:])


def test_side_by_side_and_one_after_another_are_the_same_sums(device, dtype):
    from sparring.kernels.device.linear import linear, num_parts

    assert num_parts(2060, 70) == 8 and num_parts(1024, 151936) == 1
    x, weight = on(device, torch.randn(70, 2060).to(dtype), torch.randn(70, 2060).to(dtype))
    assert torch.equal(linear(x, weight, None, torch.float32, few_rows=0), linear(x, weight, None, torch.float32))


def close(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        assert (a.float() - b.float()).abs().max() <= 4 * ULP[dtype] * max(1.0, b.float().abs().max().item())


def test_rows_are_those_of_plain_torch(device, dtype):
    path, plain = DevicePath(), TorchPath()
    x, y, weight = on(device, *(torch.randn(*shape).to(dtype) for shape in ((7, 40), (7, 40), (40,))))
    close(path.add_rms_norm(x, y, weight, 1e-6), plain.add_rms_norm(x, y, weight, 1e-6), dtype)
    assert torch.equal(
        path.add_rms_norm(x, y, weight, 1e-6)[1][3:5], path.add_rms_norm(x[3:5], y[3:5], weight, 1e-6)[1]
    )
    assert torch.equal(path.rms_norm(x + y, weight, 1e-6), path.add_rms_norm(x, y, weight, 1e-6)[1]) or INTERPRETED
    qkv, *angles = on(device, *(torch.randn(*shape).to(dtype) for shape in ((5, 10 * 24), (5, 24), (5, 24))))
    q_weight, k_weight = on(device, torch.randn(24).to(dtype), torch.randn(24).to(dtype))
    for norms in (None, (q_weight, k_weight, 1e-6)):
        close(path.split_heads(qkv, angles, norms, 6, 2), plain.split_heads(qkv, angles, norms, 6, 2), dtype)
    close([path.swiglu(qkv)], [plain.swiglu(qkv)], dtype)


@pytest.mark.parametrize("count", [1, 5, 16, 37])
def test_gradients_of_rows_are_those_of_plain_torch(device, count, dtype):
    """Plain torch computes in float32 on the CPU; what is compared is rounded to bfloat16 at most twice."""
    torch.manual_seed(4)
    plain, path = TorchPath(), DevicePath()

    def alike(name, *inputs):
        expected = getattr(plain, name)(*inputs)
        found = getattr(path, name)(*moved(inputs, device))
        pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else zip(found, expected, strict=True)
        for a, b in pairs:
            if b is None:
                assert a is None
                continue
            assert a.dtype is b.dtype and a.shape == b.shape
            assert (a.cpu().float() - b.float()).abs().max() <= 8 * ULP[dtype] * max(1.0, b.float().abs().max().item())

    x, grad, more = (torch.randn(count, 40).to(dtype) for _ in range(3))
    weight = torch.randn(40).to(dtype)
    alike("rms_norm_backward", x, weight, grad, 1e-6)
    for total in (None, more):
        alike("add_rms_norm_backward", x, weight, total, grad, 1e-6)
    qkv, *angles = (torch.randn(*shape).to(dtype) for shape in ((count, 10 * 24), (count, 24), (count, 24)))
    grads = tuple(torch.randn(count, heads, 24).to(dtype) for heads in (6, 2, 2))
    norms = (torch.randn(24).to(dtype), torch.randn(24).to(dtype), 1e-6)
    for of_heads in (None, norms):
        alike("split_heads_backward", qkv, tuple(angles), of_heads, grads)
    alike("swiglu_backward", torch.randn(count, 2 * 2050).to(dtype), torch.randn(count, 2050).to(dtype))


def moved(value, device):
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("tree", [False, True], ids=["rows", "tree"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("form", FORMS, ids=["full", "window", "cap"])
def test_attention_and_its_gradients_are_those_of_plain_torch(device, form, sinks, tree):
    torch.manual_seed(1)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    shared = torch.tensor([0, 3, 0, 70], dtype=torch.int32) if tree else None
    q, k, v, grad = (torch.randn(sum(LENGTHS), heads, 32) for heads in (6, 2, 2, 6))
    weights = torch.randn(6) if sinks else None
    plain = TorchPath()
    expected = plain.attention_packed(q, k, v, offsets, form, shared, weights)
    slopes = plain.attention_packed_backward((q, k, v, offsets, shared, *expected), grad, form)
    path, there = DevicePath(), on(device, q, k, v, offsets, shared, weights, grad)
    found = path.attention_packed(*there[:4], form, there[4], there[5])
    close([t.cpu() for t in found], expected, torch.float32)
    backward = path.attention_packed_backward((*there[:5], *found), there[6], form)
    close([t.cpu() for t in backward], slopes, torch.float32)


@pytest.mark.parametrize("form", FORMS, ids=["full", "window", "cap"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_have_the_bits_of_packed_rows(device, form, page_size, dtype):
    """Each sequence in two calls with others in between, its pages in disorder."""
    torch.manual_seed(2)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    q, k, v = on(device, *(torch.randn(sum(LENGTHS), heads, 32).to(dtype) for heads in (6, 2, 2)))
    sinks = torch.randn(6).to(device)
    whole = ops.attention_packed(q, k, v, offsets.to(device), form, None, sinks)
    where = {"dtype": dtype, "device": device, "transposed": False}
    pages = ops.KvPages(ops.KvHeads.uniform(1, 2, 32), num_pages=32, page_size=page_size, **where)
    tables = torch.randperm(32)[: 4 * -(-90 // page_size)].view(4, -1).to(torch.int32)
    begins = [0] * 4
    for ends in ([4, 1, 30, 89], LENGTHS):
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        places = torch.cat([torch.arange(b, e) + o for b, e, o in zip(begins, ends, offsets.tolist(), strict=False)])
        rows = (tables, torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32))
        at = places.to(device)
        out = ops.attention_paged(q[at], k[at], v[at], pages, 0, ops.PagedRows(*on(device, *rows)), form, sinks)
        assert torch.equal(out, whole[at])
        begins = ends
