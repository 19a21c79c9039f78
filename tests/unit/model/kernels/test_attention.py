"""Packed, paged, whole, in chunks, among others or alone: one row of attention has one value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.errors import BadInput
from sparring.model.kernels import ops

LENGTHS = (5, 75, 17, 1, 130)

pytestmark = pytest.mark.usefixtures("path")


def offsets(lengths: tuple[int, ...] | list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def qkv(num_tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, count, size, generator=generator).to(dtype) for count in (heads, groups, groups)]


def in_chunks(
    tensors: list[torch.Tensor], lengths: tuple[int, ...], page_size: int, scale: float, chunk: int, seed: int
) -> torch.Tensor:
    """The sequences of a packed call through pages in random order, each call bringing up to `chunk` rows of each."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = tensors
    per_sequence = -(-max(lengths) // page_size)
    num_pages = per_sequence * len(lengths) + 3
    tables = torch.randperm(num_pages, generator=generator)[: per_sequence * len(lengths)].view(len(lengths), -1).to(torch.int32)
    pages = ops.KvPages(
        num_layers=2, num_pages=num_pages, page_size=page_size, num_kv_heads=k.shape[1], head_dim=k.shape[2], dtype=k.dtype
    )
    pages.keys.fill_(float("nan"))  # what is not written must not be read
    pages.values.fill_(float("nan"))
    starts, done, out = offsets(lengths).tolist(), [0] * len(lengths), torch.full_like(q, float("nan"))
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        wish = torch.randint(0, chunk + 1, (len(lengths),), generator=generator).tolist()
        new = [min(w, n - d) for w, n, d in zip(wish, lengths, done, strict=True)]
        index = torch.cat([torch.arange(s + d, s + d + n) for s, d, n in zip(starts, done, new, strict=False)])
        done = [d + n for d, n in zip(done, new, strict=True)]
        rows = ops.PagedRows(tables, offsets(new), torch.tensor(done, dtype=torch.int32))
        torch.set_num_threads(1 + sum(done) % 4)
        out[index] = ops.attention_paged(q[index], k[index], v[index], pages, 1, rows, scale)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 64), (3, 1, 16), (2, 2, 40), (8, 1, 128)])
def test_packed_row_is_the_row_of_its_sequence_alone(heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
    tensors = qkv(sum(LENGTHS), heads, groups, size, dtype)
    scale = size**-0.5
    torch.set_num_threads(1)
    together = ops.attention_packed(*tensors, offsets(LENGTHS), scale)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for begin, end in zip(offsets(LENGTHS).tolist(), offsets(LENGTHS).tolist()[1:], strict=False):
            alone = ops.attention_packed(*(t[begin:end] for t in tensors), offsets([end - begin]), scale)
            assert torch.equal(alone, together[begin:end])
            shorter = ops.attention_packed(*(t[begin : end - 1] for t in tensors), offsets([end - 1 - begin]), scale)
            assert torch.equal(shorter, together[begin : end - 1])


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "groups", "size", "dtype"), [(4, 2, 64, torch.float32), (6, 2, 40, torch.bfloat16)])
def test_pages_give_the_bits_of_packed(page_size: int, heads: int, groups: int, size: int, dtype: torch.dtype, path: str) -> None:
    tensors = qkv(sum(LENGTHS), heads, groups, size, dtype)
    packed = ops.attention_packed(*tensors, offsets(LENGTHS), 0.2)
    for chunk in (1, 7, 60) if path != "exact-torch" else (40,):
        assert torch.equal(in_chunks(tensors, LENGTHS, page_size, 0.2, chunk, seed=chunk), packed)


def test_a_value_moved_by_one_unit_in_the_last_place_shows() -> None:
    q, k, v = qkv(40, 2, 1, 32, torch.float32)
    before = ops.attention_packed(q, k, v, offsets([40]), 0.2)
    v[20, 0, 5] = torch.nextafter(v[20, 0, 5], torch.tensor(100.0))
    after = ops.attention_packed(q, k, v, offsets([40]), 0.2)
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20:], after[20:])


def test_torch_attention_is_not_row_invariant() -> None:
    """The control: the same comparison finds the difference in torch's own attention."""
    q, k, v = (t.transpose(0, 1) for t in qkv(200, 4, 4, 64, torch.float32))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    single = [torch.nn.functional.scaled_dot_product_attention(q[:, n - 1 : n], k[:, :n], v[:, :n]) for n in range(1, 201)]
    assert not torch.equal(torch.cat(single, 1), whole)


def test_a_table_that_names_no_page_is_refused() -> None:
    pages = ops.KvPages(num_layers=1, num_pages=2, page_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    tensors = qkv(20, 1, 1, 16, torch.float32)
    for table in ([0, 2], [0, -1], [0]):
        rows = ops.PagedRows(torch.tensor([table], dtype=torch.int32), offsets([20]), torch.tensor([20], dtype=torch.int32))
        with pytest.raises(BadInput, match="sequence 0"):
            ops.attention_paged(*tensors, pages, 0, rows, 0.25)
    with pytest.raises(BadInput, match="page_size"):
        ops.KvPages(num_layers=1, num_pages=2, page_size=24, num_kv_heads=1, head_dim=16, dtype=torch.float32)


def test_a_copied_page_serves_like_the_original() -> None:
    q, k, v = qkv(17, 2, 1, 16, torch.float32)
    packed = ops.attention_packed(q, k, v, offsets([17]), 0.25)
    pages = ops.KvPages(num_layers=1, num_pages=4, page_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float32)

    def step(table: list[int], rows: slice) -> torch.Tensor:
        length = torch.tensor([rows.stop], dtype=torch.int32)
        where = ops.PagedRows(torch.tensor([table], dtype=torch.int32), offsets([rows.stop - rows.start]), length)
        return ops.attention_paged(q[rows], k[rows], v[rows], pages, 0, where, 0.25)

    step([0, 1], slice(0, 16))
    pages.copy_page(0, 3)
    assert torch.equal(step([3, 2], slice(16, 17)), packed[16:])


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    group=st.integers(1, 3),
    page_size=st.sampled_from([16, 48]),
    chunk=st.integers(1, 30),
)
def test_any_packing_any_chunking(lengths: list[int], group: int, page_size: int, chunk: int) -> None:
    tensors = qkv(sum(lengths), 2 * group, 2, 16, torch.float32, seed=sum(lengths))
    packed = ops.attention_packed(*tensors, offsets(lengths), 0.25)
    assert torch.equal(in_chunks(tensors, tuple(lengths), page_size, 0.25, chunk, seed=chunk), packed)
