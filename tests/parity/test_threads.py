"""No gradient depends on how many threads compute it: operation by operation, and a step of the trainer.

torch's own products over rows do, from processor to processor at other shapes, and so does its layer norm, everywhere.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from suite import short_of
from torch.autograd import Function

from sparring.algo.loss.imitate import ImitateLoss
from sparring.batch.denominators import denominators
from sparring.kernels import gradients, mixtures, ops
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.train.config import TrainConfig
from sparring.train.trainer import LocalTrainer
from sparring.types import Batch, Sample

THREADS = (1, 2, 3, 4)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=("float32", "bfloat16"))
ROWS = (1, 7, 12, 31, 64, 129, 257, 511, 512, 1000, 2048, 4095)
MODEL_A = {"width": 256, "heads": 4, "kv_heads": 2, "size": 64, "inner": 768, "vocabulary": 4096}
MODEL_B = {"width": 1024, "heads": 16, "kv_heads": 8, "size": 128, "inner": 3072, "vocabulary": 9192}
"""Of `benchmarks/engine.py`; B's vocabulary is cut to what makes two slabs of `gradients.SLAB`."""

Outputs = tuple[torch.Tensor, ...]
Case = Callable[[int, torch.dtype, dict[str, int]], tuple[Outputs, Outputs]]
"""Of a number of rows, a dtype and the sizes of a model: what was computed, and of what gradients are taken."""


pytestmark = pytest.mark.usefixtures("kernel_path")


def leaf(*shape: int, dtype: torch.dtype = FLOAT32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * len(shape))
    return (torch.randn(*shape, generator=generator) * 0.5).to(dtype).requires_grad_()


def product(rows: int, dtype: torch.dtype, inputs: int, *outputs: int) -> tuple[Outputs, Outputs]:
    """Weights of these outputs behind one product, with a bias."""
    x = leaf(rows, inputs, dtype=dtype)
    weights = [leaf(count, inputs, dtype=dtype, seed=i + 1) for i, count in enumerate(outputs)]
    bias = leaf(sum(outputs), seed=9)
    return (ops.linear(x, ops.pack(*weights), bias),), (x, *weights, bias)


def head_in_chunks(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    """A head's logits in chunks, whose weight adds up its gradients slab by slab; tied to the embedding of the rows."""
    weight, total = leaf(of["vocabulary"], of["width"], dtype=dtype), ops.WeightSum()
    tokens = torch.arange(rows) * 7 % 50
    x, packed = total.attach(F.embedding(tokens, weight), weight), ops.pack(weight)
    parts = [ops.linear(part, packed, None, FLOAT32, total) for part in x.split(max(16, -(-rows // 2)))]
    return tuple(parts), (weight,)


def low_rank(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    x, a, b = (leaf(*shape, dtype=dtype) for shape in ((rows, of["width"]), (8, of["width"]), (of["inner"], 8)))
    inside = (ops.linear(x, ops.pack(a), None, FLOAT32) * 0.5).to(dtype)
    return (ops.linear(inside, ops.pack(b)),), (x, a, b)


def joined_heads(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    heads, groups, size = of["heads"], of["kv_heads"], of["size"]
    qkv = leaf(rows, (heads + 2 * groups) * size, dtype=dtype)
    q, k = (leaf(size, dtype=dtype, seed=seed) for seed in range(2))
    angles = (leaf(rows, size, seed=2).detach(), leaf(rows, size, seed=3).detach())
    return ops.split_heads(qkv, *angles, (q, k, 1e-6), heads, groups), (qkv, q, k)


def lengths_of(rows: int) -> list[int]:
    """Sequences of at most 300 rows, of different lengths."""
    found = []
    while sum(found) < rows:
        found.append(min(rows - sum(found), 300 - 37 * (len(found) % 5)))
    return found


def attention(bent: bool, tree: bool) -> Case:
    """Plain, or with a window, a cap and sinks; sequences apart, or walks through a tree of prefixes."""

    def case(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
        heads, groups, size = of["heads"], of["kv_heads"], of["size"]
        q, k, v = (leaf(rows, n, size, dtype=dtype, seed=i) for i, n in enumerate((heads, groups, groups)))
        lengths = lengths_of(rows)
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        shared = torch.tensor([0, *(min(9, length) for length in lengths[:-1])], dtype=torch.int32) if tree else None
        form = ops.AttentionForm(0.1, window=40, cap=1.5) if bent else ops.AttentionForm(0.1)
        sinks = leaf(heads) if bent else None
        out = ops.attention_packed(q, k, v, offsets, form, shared, sinks)
        return (out,), (q, k, v) if sinks is None else (q, k, v, sinks)

    return case


def logprobs(rows: int, _: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    logits, targets = leaf(rows, of["vocabulary"]), torch.arange(rows) * 17 % of["vocabulary"]
    return ops.token_logprobs(logits, targets, torch.linspace(0.5, 1.5, rows)), (logits,)


def mixture(rows: int, _: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    """Shares of experts, and a row that several of them read."""
    logits, x = leaf(rows, 32), leaf(rows, of["width"], seed=1)
    chosen, shares = ops.route(logits, 4, renormalised=False)
    order = chosen.flatten().sort(stable=True)[1]
    read = x.index_select(0, order // 4).index_select(0, order.argsort()).view(rows, 4, -1)
    return ((read * shares.unsqueeze(-1)).sum(1), ops.route(logits, 4, renormalised=True)[1]), (logits, x)


def elementwise(function: Callable[..., torch.Tensor], operands: int = 1) -> Case:
    def case(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
        inputs = tuple(leaf(rows, of["inner"], dtype=dtype, seed=seed) for seed in range(operands))
        return (function(*inputs),), inputs

    return case


def turned(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    x = leaf(rows, of["heads"], of["size"], dtype=dtype)
    cos, sin = (leaf(rows, of["size"], seed=seed) for seed in range(2))
    return (ops.rope(x, cos.detach(), sin.detach()),), (x,)


def normed(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    x, y = (leaf(rows, of["width"], dtype=dtype, seed=seed) for seed in range(2))
    weight = leaf(of["width"], dtype=dtype)
    return (*ops.add_rms_norm(x, y, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)), (x, y, weight)


def layer_normed(rows: int, dtype: torch.dtype, of: dict[str, int]) -> tuple[Outputs, Outputs]:
    """The library's, and a weight of its that many rows are multiplied with."""
    x = leaf(rows, of["width"], dtype=dtype)
    weight, bias = (leaf(of["width"], dtype=dtype, seed=seed) for seed in range(2))
    y = gradients.LayerNorm.apply(x, weight, bias, 1e-5)
    return (y, x * gradients.Broadcast.apply(weight, x.shape)), (x, weight, bias)


CASES: dict[str, Case] = {
    "odd product": lambda rows, dtype, of: product(rows, dtype, 33, 65),
    "narrow product": lambda rows, dtype, of: product(rows, dtype, 160, 160),
    "queries, keys and values": lambda rows, dtype, of: product(
        rows, dtype, of["width"], of["heads"] * of["size"], of["kv_heads"] * of["size"], of["kv_heads"] * of["size"]
    ),
    "output of attention": lambda rows, dtype, of: product(rows, dtype, of["heads"] * of["size"], of["width"]),
    "gate and up": lambda rows, dtype, of: product(rows, dtype, of["width"], of["inner"], of["inner"]),
    "down": lambda rows, dtype, of: product(rows, dtype, of["inner"], of["width"]),
    "head": lambda rows, dtype, of: product(rows, dtype, of["width"], of["vocabulary"]),
    "head in chunks, tied": head_in_chunks,
    "low rank": low_rank,
    "norms": normed,
    "layer norm": layer_normed,
    "joined heads": joined_heads,
    "rotary": turned,
    "swiglu": elementwise(ops.swiglu),
    "silu": elementwise(ops.silu),
    "silu times": elementwise(ops.silu_mul, 2),
    "gelu": elementwise(ops.gelu_tanh),
    "soft cap": elementwise(lambda x: ops.soft_cap(x, 3.0)),
    "attention": attention(bent=False, tree=False),
    "attention over a tree, with window, cap and sinks": attention(bent=True, tree=True),
    "log-probabilities": logprobs,
    "mixture": mixture,
}
PRODUCTS = (
    "queries, keys and values",
    "output of attention",
    "gate and up",
    "down",
    "head in chunks, tied",
    "low rank",
)
QUICK = {"odd product": 4095, "narrow product": 4096, "output of attention": 1000, "head in chunks, tied": 300}


def check(name: str, rows: int, dtype: torch.dtype, of: dict[str, int]) -> None:
    """All gradients of a case have the same bits with each number of threads."""
    outputs, inputs = CASES[name](rows, dtype, of)
    slopes = [torch.cos(torch.arange(out.numel()) * 0.7).view(out.shape).to(out.dtype) for out in outputs]
    expected: Outputs = ()
    for threads in THREADS:
        torch.set_num_threads(threads)
        found = torch.autograd.grad(outputs, inputs, slopes, retain_graph=True)
        expected = expected or found
        assert all(map(torch.equal, found, expected)), f"{name}: {rows} rows, {threads} threads"


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_the_number_of_threads(name: str, dtype: torch.dtype) -> None:
    check(name, QUICK.get(name, 333), dtype, MODEL_A)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_model_a_do_not_depend_on_threads(name: str, dtype: torch.dtype) -> None:
    for rows in ROWS:
        check(name, rows, dtype, MODEL_A)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_model_b_do_not_depend_on_threads(name: str) -> None:
    for rows in (31, 1000, 4095):
        check(name, rows, BFLOAT16, MODEL_B)


def test_every_function_with_a_gradient_is_among_them() -> None:
    """By the names of the graph's nodes."""
    ours = {
        f"{name}Backward"
        for module in (gradients, mixtures)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Function) and kind.__module__ == module.__name__
    }
    seen: set[str] = set()
    for case in CASES.values():
        nodes = [out.grad_fn for out in case(20, FLOAT32, MODEL_A)[0]]
        while nodes:
            node = nodes.pop()
            seen.add(node.name())
            nodes += [after for after, _ in node.next_functions if after is not None]
    assert ours and ours <= seen


def test_the_numbers_of_threads_are_real() -> None:
    """torch's own layer norm adds up the gradient of its weight thread by thread."""
    x, weight, found = leaf(1000, 256).detach(), leaf(256), []
    for threads in THREADS:
        torch.set_num_threads(threads)
        found += torch.autograd.grad(F.layer_norm(x, (256,), weight), weight, x)
    assert not any(torch.equal(one, found[0]) for one in found[1:])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers as wide as model A."""
    sizes = {
        "hidden_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
    }
    init = InitConfig(**sizes, max_positions=512, tie_embeddings=False, vocab_size=512)
    return str(create(init, 512, str(tmp_path_factory.mktemp("threads") / "model"), 0))


@pytest.mark.parametrize("dtype", short_of(["float32", "bfloat16"], ["bfloat16"]))
def test_two_trainer_steps_do_not_depend_on_threads(dtype: str, model_path: str, kernel_path: str) -> None:
    """Micro-batches side by side, clipping by the norm of all gradients, and AdamW."""
    length, count = (40, 3) if kernel_path == "exact-torch" else (170, 12)
    rows = [
        Sample(
            id=str(i),
            group="0",
            source="policy",
            tokens=tuple((i * i + 7 * t) % 512 for t in range(length + i)),
            weights={"imitate": (0.0, *(1.0 for _ in range(length + i - 1)))},
        )
        for i in range(count)
    ]
    batch = Batch(step=1, model="policy", rows=tuple(rows), denominators=denominators(rows))

    async def weights(threads: int) -> dict[str, torch.Tensor]:
        config = TrainConfig(token_budget=4096, learning_rate=1e-3, gradient_clip=0.1)
        trainer = LocalTrainer(
            load(model_path, dtype=dtype), config, [ImitateLoss()], name="policy", total_steps=9, threads=threads
        )
        for _ in range(2):
            await trainer.forward_backward(batch)
            await trainer.step()
        await trainer.close()
        return trainer._optimiser.masters()

    expected, *others = (asyncio.run(weights(threads)) for threads in THREADS)
    for found in others:
        assert all(torch.equal(found[name], one) for name, one in expected.items())
