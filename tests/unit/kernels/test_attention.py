"""Packed, paged, whole, in chunks, among others or alone: one row of attention has one value."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.errors import BadInput
from sparring.kernels import ops
from sparring.kernels.compiled.library import COMPILED

LENGTHS = (5, 75, 17, 1, 130)
SINKS = torch.linspace(-2.0, 3.0, 8)

Form = tuple[ops.AttentionForm, torch.Tensor | None]
PLAIN: Form = (ops.AttentionForm(0.2), None)
FORMS: dict[str, tuple[ops.AttentionForm, bool]] = {
    "plain": (PLAIN[0], False),
    "window": (ops.AttentionForm(0.2, window=20), False),
    "window of one": (ops.AttentionForm(0.2, window=1), False),
    "cap": (ops.AttentionForm(0.2, cap=1.5), False),
    "sinks": (PLAIN[0], True),
    "all": (ops.AttentionForm(0.2, window=33, cap=1.5), True),
}

pytestmark = pytest.mark.usefixtures("path")


def offsets(lengths: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def qkv(num_tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, count, size, generator=generator).to(dtype) for count in (heads, groups, groups)]


def in_chunks(
    tensors: list[torch.Tensor],
    lengths: tuple[int, ...],
    page_size: int,
    form: Form,
    chunk: int,
    seed: int,
) -> torch.Tensor:
    """The sequences of a packed call through pages in random order, each call bringing up to `chunk` rows of each."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = tensors
    per_sequence = -(-max(lengths) // page_size)
    num_pages = per_sequence * len(lengths) + 3
    tables = (
        torch.randperm(num_pages, generator=generator)[: per_sequence * len(lengths)]
        .view(len(lengths), -1)
        .to(torch.int32)
    )
    pages = ops.KvPages(ops.KvHeads.uniform(2, *k.shape[1:]), num_pages=num_pages, page_size=page_size, dtype=k.dtype)
    for tensor in pages.tensors:
        tensor.fill_(float("nan"))  # what is not written must not be read
    starts, done, out = offsets(lengths).tolist(), [0] * len(lengths), torch.full_like(q, float("nan"))
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        wish = torch.randint(0, chunk + 1, (len(lengths),), generator=generator).tolist()
        new = [min(w, n - d) for w, n, d in zip(wish, lengths, done, strict=True)]
        index = torch.cat([torch.arange(s + d, s + d + n) for s, d, n in zip(starts, done, new, strict=False)])
        done = [d + n for d, n in zip(done, new, strict=True)]
        rows = ops.PagedRows(tables, offsets(new), torch.tensor(done, dtype=torch.int32))
        torch.set_num_threads(1 + sum(done) % 4)
        out[index] = ops.attention_paged(q[index], k[index], v[index], pages, 1, rows, *form)
    return out


def with_sinks(name: str, heads: int) -> Form:
    form, has_sinks = FORMS[name]
    return form, SINKS[:heads] if has_sinks else None


def packed(tensors: Sequence[torch.Tensor], lengths: Sequence[int], form: Form) -> torch.Tensor:
    return ops.attention_packed(*tensors, offsets(list(lengths)), form[0], None, form[1])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 64), (3, 1, 16), (2, 2, 40), (8, 1, 128)])
def test_packed_row_is_the_row_of_its_sequence_alone(
    heads: int, groups: int, size: int, dtype: torch.dtype, name: str
) -> None:
    tensors, form = qkv(sum(LENGTHS), heads, groups, size, dtype), with_sinks(name, heads)
    torch.set_num_threads(1)
    together = packed(tensors, LENGTHS, form)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for begin, end in zip(offsets(LENGTHS).tolist(), offsets(LENGTHS).tolist()[1:], strict=False):
            alone = packed([t[begin:end] for t in tensors], [end - begin], form)
            assert torch.equal(alone, together[begin:end])
            shorter = packed([t[begin : end - 1] for t in tensors], [end - 1 - begin], form)
            assert torch.equal(shorter, together[begin : end - 1])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "groups", "size", "dtype"), [(4, 2, 64, torch.float32), (6, 2, 40, torch.bfloat16)])
def test_pages_give_the_bits_of_packed(
    page_size: int, heads: int, groups: int, size: int, dtype: torch.dtype, name: str, path: str
) -> None:
    tensors, form = qkv(sum(LENGTHS), heads, groups, size, dtype), with_sinks(name, heads)
    expected = packed(tensors, LENGTHS, form)
    for chunk in (1, 7, 60) if path != "exact-torch" else (40,):
        assert torch.equal(in_chunks(tensors, LENGTHS, page_size, form, chunk, seed=chunk), expected)


def test_a_full_window_and_a_sink_of_minus_infinity_change_no_bit() -> None:
    tensors = qkv(sum(LENGTHS), 4, 2, 64, torch.float32)
    plain = packed(tensors, LENGTHS, PLAIN)
    assert torch.equal(packed(tensors, LENGTHS, (ops.AttentionForm(0.2, window=130), None)), plain)
    assert torch.equal(packed(tensors, LENGTHS, (PLAIN[0], torch.full((4,), float("-inf")))), plain)
    assert not torch.equal(packed(tensors, LENGTHS, (ops.AttentionForm(0.2, window=129), None)), plain)


@pytest.mark.kernel_paths(*COMPILED)
@pytest.mark.parametrize("window", [1, 16, 20, 100])
def test_keys_outside_the_window_are_not_read(window: int) -> None:
    """Not in a tile of several rows, of which one may read it, nor from pages. The torch path multiplies it by zero."""
    tensors, form = qkv(150, 4, 2, 32, torch.float32), (ops.AttentionForm(0.2, window=window), None)
    before = packed(tensors, [150], form)
    tensors[1][40] = tensors[2][40] = float("nan")
    after = packed(tensors, [150], form)
    expected = before.clone()
    expected[40 : 40 + window] = float("nan")
    assert torch.equal(after.isnan(), expected.isnan())
    assert torch.equal(after.nan_to_num(), expected.nan_to_num())
    assert torch.equal(in_chunks(tensors, (150,), 16, form, 20, seed=1).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("settings", [{"window": 0}, {"window": -3}, {"cap": 0.0}])
def test_windows_caps_and_sinks_that_do_not_fit_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="above 0"):
        ops.AttentionForm(0.2, **settings)
    with pytest.raises(BadInput, match="one sink for each of 2 heads"):
        packed(qkv(4, 2, 1, 16, torch.float32), [4], (PLAIN[0], torch.zeros(3)))


def test_a_value_moved_by_one_unit_in_the_last_place_shows() -> None:
    q, k, v = qkv(40, 2, 1, 32, torch.float32)
    before = packed((q, k, v), [40], PLAIN)
    v[20, 0, 5] = torch.nextafter(v[20, 0, 5], torch.tensor(100.0))
    after = packed((q, k, v), [40], PLAIN)
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20:], after[20:])


def test_torch_attention_is_not_row_invariant() -> None:
    """The control: the same comparison finds the difference in torch's own attention."""
    q, k, v = (t.transpose(0, 1) for t in qkv(200, 4, 4, 64, torch.float32))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    single = [
        torch.nn.functional.scaled_dot_product_attention(q[:, n - 1 : n], k[:, :n], v[:, :n]) for n in range(1, 201)
    ]
    assert not torch.equal(torch.cat(single, 1), whole)


def test_a_table_that_names_no_page_is_refused() -> None:
    pages = ops.KvPages(ops.KvHeads.uniform(1, 1, 16), num_pages=2, dtype=torch.float32)
    tensors = qkv(20, 1, 1, 16, torch.float32)
    for table in ([0, 2], [0, -1], [0]):
        rows = ops.PagedRows(
            torch.tensor([table], dtype=torch.int32), offsets([20]), torch.tensor([20], dtype=torch.int32)
        )
        with pytest.raises(BadInput, match="sequence 0"):
            ops.attention_paged(*tensors, pages, 0, rows, PLAIN[0])
    with pytest.raises(BadInput, match="page_size"):
        ops.KvPages(ops.KvHeads.uniform(1, 1, 16), num_pages=2, page_size=24, dtype=torch.float32)


def test_a_copied_page_serves_like_the_original() -> None:
    q, k, v = qkv(17, 2, 1, 16, torch.float32)
    whole = packed((q, k, v), [17], PLAIN)
    pages = ops.KvPages(ops.KvHeads.uniform(1, 1, 16), num_pages=4, dtype=torch.float32)

    def step(table: list[int], rows: slice) -> torch.Tensor:
        length = torch.tensor([rows.stop], dtype=torch.int32)
        where = ops.PagedRows(torch.tensor([table], dtype=torch.int32), offsets([rows.stop - rows.start]), length)
        return ops.attention_paged(q[rows], k[rows], v[rows], pages, 0, where, PLAIN[0])

    step([0, 1], slice(0, 16))
    pages.copy_page(0, 3)
    assert torch.equal(step([3, 2], slice(16, 17)), whole[16:])


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    group=st.integers(1, 3),
    page_size=st.sampled_from([16, 48]),
    chunk=st.integers(1, 30),
    window=st.none() | st.integers(1, 70),
)
def test_any_packing_any_chunking(
    lengths: list[int], group: int, page_size: int, chunk: int, window: int | None
) -> None:
    tensors = qkv(sum(lengths), 2 * group, 2, 16, torch.float32, seed=sum(lengths))
    form = (ops.AttentionForm(0.25, window=window), None)
    expected = packed(tensors, lengths, form)
    assert torch.equal(in_chunks(tensors, tuple(lengths), page_size, form, chunk, seed=chunk), expected)
