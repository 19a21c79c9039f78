"""A row computed alone, in company, by one thread or by four: the same bits, on both paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.kernels import ops

Rows = Callable[[slice], torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16)
LINEAR_SHAPES = ((128, 384), (256, 768), (768, 256), (256, 4096), (64, 100))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_that_change(rows: Rows, count: int) -> list[str]:
    """Calls whose rows differ in any bit from those of the full call with one thread."""
    torch.set_num_threads(1)
    full = rows(slice(0, count))
    assert full.isfinite().all()
    pieces = [slice(i, i + 1) for i in range(0, count, 3)] + [slice(1, 8), slice(2, 13), slice(0, 17), slice(5, count)]
    changed = [f"{piece} alone" for piece in pieces if not torch.equal(rows(piece), full[piece])]
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        for piece in (slice(0, count), pieces[0], pieces[-3]):
            changed += [] if torch.equal(rows(piece), full[piece]) else [f"{piece}, {threads} threads"]
    return changed


@pytest.mark.parametrize(("inputs", "outputs"), LINEAR_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_row_is_the_same_at_every_row_count(inputs: int, outputs: int, dtype: torch.dtype, path: str) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=2)
    x, packed = random(300, inputs, dtype=dtype, seed=1), ops.pack(weight)
    torch.set_num_threads(1)
    full = ops.linear(x, packed, bias)
    every = path != "exact-torch" and outputs < 1000
    counts = range(1, 301) if every else (1, 2, 3, 5, 7, 11, 13, 16, 31, 48, 97, 200, 299)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        tried = [n for n in counts if n % threads == 0 or n < 20]
        changed = [n for n in tried if not torch.equal(ops.linear(x[300 - n :], packed, bias), full[300 - n :])]
        assert changed == [], f"{threads} threads"


def test_a_weight_moved_by_one_unit_in_the_last_place_shows(path: str) -> None:
    weight, x = random(64, 128), torch.zeros(5, 128)
    x[:, 3] = torch.tensor([1.0, -0.3, 1e4, 3e-5, 7.7])
    before = ops.linear(x, ops.pack(weight))
    assert torch.equal(before[0], weight[:, 3])
    weight[7, 3] = torch.nextafter(weight[7, 3], torch.tensor(10.0))
    after = ops.linear(x, ops.pack(weight))
    assert not torch.equal(before[:, 7], after[:, 7]) and torch.equal(after[0], weight[:, 3])
    assert torch.equal(torch.cat((before[:, :7], before[:, 8:]), 1), torch.cat((after[:, :7], after[:, 8:]), 1))


def test_update_packs_the_new_values_in_place(path: str) -> None:
    weight, x = random(70, 48), random(9, 48, seed=1)
    packed = ops.pack(weight)
    storage = packed.storage.data_ptr()
    weight.mul_(1.5).add_(0.25)
    packed.update(weight)
    assert torch.equal(ops.linear(x, packed), ops.linear(x, ops.pack(weight)))
    assert packed.storage.data_ptr() == storage


def test_weights_packed_in_inference_mode_can_be_updated_outside(path: str) -> None:
    """As of a model that was first judged and then trained."""
    weight, x = random(70, 48), random(9, 48, seed=1)
    with torch.inference_mode():
        packed, stack = ops.pack(weight), ops.PackedStack([weight, weight])
    packed.update(weight.mul_(1.5))
    stack.update([weight, weight])
    expected = ops.linear(x, ops.pack(weight))
    assert torch.equal(ops.linear(x, packed), expected)
    assert torch.equal(ops.linear_groups(x, stack, None, torch.tensor([4, 5])), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 40, 96, 256])
def test_norm_silu_and_rope_rows(width: int, dtype: torch.dtype, path: str) -> None:
    x, y, weight = (
        random(60, width, dtype=dtype),
        random(60, width, dtype=dtype, seed=1),
        random(width, dtype=dtype, seed=2),
    )
    heads = random(60, 3, width, dtype=dtype, seed=3)
    assert rows_that_change(lambda s: ops.rms_norm(x[s], weight, 1e-6), 60) == []
    assert rows_that_change(lambda s: ops.silu(x[s] * 4), 60) == []
    assert rows_that_change(lambda s: ops.silu_mul(x[s], y[s]), 60) == []
    assert rows_that_change(lambda s: ops.soft_cap(x[s] * 4, 3.0), 60) == []
    assert rows_that_change(lambda s: ops.gelu_tanh(x[s] * 4), 60) == []
    assert rows_that_change(lambda s: ops.rope(heads[s], x[s], y[s]), 60) == []


@pytest.mark.parametrize("vocabulary", [100, 1024, 3001])
def test_logprob_and_sample_rows(vocabulary: int, path: str) -> None:
    logits = random(60, vocabulary) * 3
    targets = torch.randint(0, vocabulary, (60,), generator=torch.Generator().manual_seed(1))
    temperature, positions = torch.rand(60, generator=torch.Generator().manual_seed(2)) + 0.3, torch.arange(60)
    temperature[::7] = 0
    top_k, top_p = torch.arange(60) % 3 * 5, torch.where(torch.arange(60) % 2 == 0, 1.0, 0.8)
    min_p = torch.arange(60) % 5 // 4 * 0.1

    def sampled(s: slice) -> torch.Tensor:
        tokens, logprobs, _ = ops.sample(
            logits[s], temperature[s], top_k[s], top_p[s], min_p[s], positions[s] * 977, positions[s]
        )
        return torch.stack((tokens.float(), logprobs), 1)

    assert (
        rows_that_change(lambda s: torch.stack(ops.token_logprobs(logits[s], targets[s], temperature[s]), 1), 60) == []
    )
    assert rows_that_change(sampled, 60) == []


@settings(max_examples=25, deadline=None)
@given(inputs=st.integers(1, 300), outputs=st.integers(1, 200), count=st.integers(1, 40), data=st.data())
def test_linear_of_any_shape_keeps_its_rows(inputs: int, outputs: int, count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first + 1, count))
    x, packed = random(count, inputs), ops.pack(random(outputs, inputs, seed=1))
    assert torch.equal(ops.linear(x[first:last], packed), ops.linear(x, packed)[first:last])
