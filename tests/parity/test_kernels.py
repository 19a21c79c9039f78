"""The kernels against torch in float64: values no further off than torch's own, gradients within rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sparring.kernels import ops

PLAIN, BENT = ops.AttentionForm(0.2), ops.AttentionForm(0.2, window=40, cap=1.5)
LENGTHS = (5, 130, 17, 1)


@pytest.fixture(autouse=True)
def path(kernel_path: str) -> str:
    """Every path of the run in turn."""
    return kernel_path


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def offsets() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's attention, sequence by sequence."""
    pieces = []
    for begin, end in zip(offsets().tolist(), offsets().tolist()[1:], strict=False):
        one = (t[begin:end].transpose(0, 1) for t in (q, k, v))
        pieces.append(F.scaled_dot_product_attention(*one, is_causal=True, scale=0.2, enable_gqa=True).transpose(0, 1))
    return torch.cat(pieces)


def bent_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The formulas, sequence by sequence, for `BENT`."""
    pieces = []
    for begin, end in zip(offsets().tolist(), offsets().tolist()[1:], strict=False):
        group, distance = q.shape[1] // k.shape[1], torch.arange(end - begin).unsqueeze(1) - torch.arange(end - begin)
        keys, values = (t[begin:end].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * BENT.scale
        scores = BENT.cap * torch.tanh(scores / BENT.cap)
        scores = scores.masked_fill((distance < 0) | (distance >= BENT.window), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, end - begin, 1)), -1)
        weights = scores.softmax(-1)[..., : end - begin]
        pieces.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(pieces)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, rms_norm(x + y, weight)


def split_heads(qkv: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four heads, two key/value heads of 40; without weights no norms."""
    q, k, v = (part.unflatten(1, (-1, 40)) for part in qkv.split([160, 80, 80], 1))
    cos, sin = (t.to(qkv.dtype) for t in ANGLES)
    if weights:
        q, k = rms_norm(q, weights[0]), rms_norm(k, weights[1])
    return rope(q, cos, sin), rope(k, cos, sin), v


def logprob_and_entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits / TEMPERATURE.to(logits.dtype).unsqueeze(1), 1)
    return log_p.gather(1, TARGETS.unsqueeze(1))[:, 0], -(log_p * log_p.exp()).sum(1)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference: steadier than the maximum."""
    return float((ours.detach().double() - exact.detach()).square().mean().sqrt())


TARGETS, TEMPERATURE = torch.arange(50) * 17 % 900, torch.linspace(0.5, 1.5, 50)
ANGLES = (random(150, 40, seed=7), random(150, 40, seed=8))
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "linear": (
        lambda x, w, b: ops.linear(x, ops.pack(w), b),
        F.linear,
        (random(50, 1030), random(70, 1030, seed=1), random(70, seed=2)),
    ),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-6), rms_norm, (random(200, 72), random(72, seed=1))),
    "silu": (ops.silu, F.silu, (random(31, 37) * 4,)),
    "silu_mul": (ops.silu_mul, lambda a, b: F.silu(a) * b, (random(31, 37) * 4, random(31, 37, seed=1))),
    "soft_cap": (lambda x: ops.soft_cap(x, 3.0), lambda x: torch.tanh(x / 3.0) * 3.0, (random(31, 37) * 4,)),
    "gelu_tanh": (ops.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), (random(31, 37) * 2,)),
    "add_rms_norm": (
        lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-6),
        add_rms_norm,
        (random(200, 72), random(200, 72, seed=3), random(72, seed=1)),
    ),
    "split_heads": (lambda x: ops.split_heads(x, *ANGLES, None, 4, 2), split_heads, (random(150, 320),)),
    "split_heads with norms": (
        lambda x, q, k: ops.split_heads(x, *ANGLES, (q, k, 1e-6), 4, 2),
        split_heads,
        (random(150, 320), random(40, seed=1), random(40, seed=2)),
    ),
    "swiglu": (
        ops.swiglu,
        lambda x: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1],
        (torch.cat((random(31, 37) * 4, random(31, 37, seed=1)), 1),),
    ),
    "attention 48": (
        lambda q, k, v: ops.attention_packed(q, k, v, offsets(), PLAIN),
        attention,
        (random(sum(LENGTHS), 6, 48), random(sum(LENGTHS), 2, 48, seed=1), random(sum(LENGTHS), 2, 48, seed=2)),
    ),
    "attention 72": (
        lambda q, k, v: ops.attention_packed(q, k, v, offsets(), PLAIN),
        attention,
        (random(sum(LENGTHS), 2, 72), random(sum(LENGTHS), 1, 72, seed=1), random(sum(LENGTHS), 1, 72, seed=2)),
    ),
    "attention with window and cap": (
        lambda q, k, v: ops.attention_packed(q, k, v, offsets(), BENT),
        bent_attention,
        (random(sum(LENGTHS), 6, 48), random(sum(LENGTHS), 2, 48, seed=1), random(sum(LENGTHS), 2, 48, seed=2)),
    ),
    "attention with window, cap and sinks": (
        lambda q, k, v, sinks: ops.attention_packed(q, k, v, offsets(), BENT, None, sinks),
        bent_attention,
        (
            random(sum(LENGTHS), 2, 72),
            random(sum(LENGTHS), 1, 72, seed=1),
            random(sum(LENGTHS), 1, 72, seed=2),
            random(2),
        ),
    ),
    "token_logprobs": (
        lambda z: ops.token_logprobs(z, TARGETS, TEMPERATURE),
        logprob_and_entropy,
        (random(50, 900) * 3,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    """Value: at most twice torch's own float32 error. Gradient: within 4e-6 of the largest, entry by entry."""
    ours, theirs, inputs = CASES[name]
    mine = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    mine_out, exact_out, torch_out = (as_tuple(f(*t)) for f, t in ((ours, mine), (theirs, exact), (theirs, inputs)))
    for a, b, c in zip(mine_out, exact_out, torch_out, strict=True):
        assert error(a, b) <= 2 * error(c, b) + 1e-9
    slopes = [random(*out.shape, seed=9) for out in mine_out]
    grads = torch.autograd.grad(mine_out, mine, slopes)
    exact_grads = torch.autograd.grad(exact_out, exact, [s.double() for s in slopes])
    for a, b in zip(grads, exact_grads, strict=True):
        assert float((a - b).abs().max()) <= 4e-6 * float(b.abs().max())


def as_tuple(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def test_rope_against_the_formula_and_its_gradient() -> None:
    x, cos, sin = random(50, 3, 40).requires_grad_(), random(50, 40, seed=1), random(50, 40, seed=2)
    exact = x.detach().double().requires_grad_()
    ours, theirs = ops.rope(x, cos, sin), rope(exact, cos.double(), sin.double())
    assert error(ours, theirs) <= 2 * error(rope(x, cos, sin), theirs)
    slope = random(50, 3, 40, seed=3)
    (a,), (b,) = torch.autograd.grad(ours, x, slope), torch.autograd.grad(theirs, exact, slope.double())
    assert torch.allclose(a.double(), b, atol=1e-6)


def test_bfloat16_is_as_close_as_torch() -> None:
    x, w = random(40, 256).bfloat16(), random(96, 256, seed=1).bfloat16()
    exact = F.linear(x.double(), w.double())
    assert error(ops.linear(x, ops.pack(w)), exact) <= 1.1 * error(F.linear(x, w), exact)
    assert error(ops.linear(x, ops.pack(w), out_dtype=torch.float32), exact) <= 1e-4
    q, k, v = (random(sum(LENGTHS), heads, 32, seed=heads).bfloat16() for heads in (4, 2, 2))
    exact = attention(q.double(), k.double(), v.double())
    assert error(ops.attention_packed(q, k, v, offsets(), PLAIN), exact) <= 1.1 * error(attention(q, k, v), exact)


def test_products_of_many_rows_and_of_joined_weights(path: str) -> None:
    """Enough rows that a weight's gradient is summed in several blocks, two weights behind one product, odd sizes."""
    shapes = ((1500, 70), (50, 70), (97, 70))
    x, *weights = (random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    ours, theirs = ops.linear(x, ops.pack(*weights)), F.linear(exact[0], torch.cat(exact[1:]))
    assert error(ours, theirs) <= 2 * error(F.linear(x, torch.cat(weights)), theirs)
    slope = random(*ours.shape, seed=5)
    grads, wanted = torch.autograd.grad(ours, (x, *weights), slope), torch.autograd.grad(theirs, exact, slope.double())
    for a, b in zip(grads, wanted, strict=True):
        assert float((a - b).abs().max()) <= 4e-6 * float(b.abs().max())


@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_what_is_not_finite_stays_so(value: float, path: str) -> None:
    x, weight = random(40, 64), random(80, 64, seed=1)
    x[3, 60] = value
    y = ops.linear(x, ops.pack(weight))
    assert not y[3].isfinite().any() and y[:3].isfinite().all() and y[4:].isfinite().all()
    weight[9, 1] = value
    assert not ops.linear(random(40, 64), ops.pack(weight))[:, 9].isfinite().any()


def test_a_tied_weight_collects_both_gradients() -> None:
    weight = torch.nn.Parameter(random(40, 16))
    packed = ops.pack(weight)
    tokens = torch.tensor([3, 9, 3])
    ops.linear(F.embedding(tokens, weight), packed).square().sum().backward()
    exact = weight.detach().double().requires_grad_()
    F.linear(F.embedding(tokens, exact), exact).square().sum().backward()
    assert weight.grad is not None and exact.grad is not None
    assert torch.allclose(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)
