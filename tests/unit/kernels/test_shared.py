"""Sequences that continue one another: the bits of the sequences laid out in full, and the sums of their gradients."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from sparring.errors import BadInput
from sparring.kernels import ops

PLAIN = (ops.AttentionForm(0.25), None)
BENT = (ops.AttentionForm(0.25, window=60, cap=1.5), torch.tensor([0.5, -1.0, 2.0, 0.1]))
Form = tuple[ops.AttentionForm, torch.Tensor | None]
Attention = Callable[[list[torch.Tensor]], torch.Tensor]

pytestmark = pytest.mark.usefixtures("path")


def walk(seed: int, sequences: int) -> tuple[list[int], list[int]]:
    """How many rows each sequence adds, and behind how many positions of the one before: none, some or all of them."""
    draw = random.Random(seed)
    own, shared, length = [], [], 0
    for _ in range(sequences):
        kept = draw.choice((0, length, draw.randint(0, length), draw.randint(0, length)))
        own.append(draw.choice((0, 1, 5, 16, 50, 70)) if kept else draw.choice((3, 40, 150)))
        shared.append(kept)
        length = kept + own[-1]
    return own, shared


def paths(own: list[int], shared: list[int]) -> list[list[int]]:
    """The rows of every sequence."""
    found: list[list[int]] = []
    start = 0
    for count, kept in zip(own, shared, strict=True):
        found.append([*(found[-1][:kept] if kept else ()), *range(start, start + count)])
        start += count
    return found


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def qkv(num_rows: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return [torch.randn(num_rows, count, size, generator=generator).to(dtype) for count in (heads, groups, groups)]


def attend(tensors: list[torch.Tensor], own: list[int], counts: torch.Tensor | None, form: Form) -> torch.Tensor:
    sinks = None if form[1] is None else form[1][: tensors[0].shape[1]]
    return ops.attention_packed(*tensors, offsets(own), form[0], counts, sinks)


def in_full(tensors: list[torch.Tensor], own: list[int], shared: list[int], form: Form) -> torch.Tensor:
    """Every sequence laid out from its first position; of the result, each sequence's own rows."""
    rows = paths(own, shared)
    index = torch.tensor([row for sequence in rows for row in sequence])
    out = attend([t[index] for t in tensors], [len(sequence) for sequence in rows], None, form)
    pieces = out.split([len(sequence) for sequence in rows])
    return torch.cat([piece[len(piece) - count :] for piece, count in zip(pieces, own, strict=True)])


@pytest.mark.parametrize("form", [PLAIN, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 64), (2, 2, 40), (3, 1, 16)])
def test_a_row_has_the_bits_of_its_sequence_in_full(
    heads: int, groups: int, size: int, dtype: torch.dtype, form: Form
) -> None:
    for seed in range(3):
        own, shared = walk(seed, 14)
        tensors = qkv(sum(own), heads, groups, size, dtype)
        expected = in_full(tensors, own, shared, form)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            counts = torch.tensor(shared, dtype=torch.int32)
            assert torch.equal(attend(tensors, own, counts, form), expected)


def gradients(tensors: list[torch.Tensor], slope: torch.Tensor, attention: Attention) -> tuple[torch.Tensor, ...]:
    inputs = [t.clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(attention(inputs), inputs, slope)


@pytest.mark.parametrize("form", [PLAIN, BENT], ids=["plain", "bent"])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 64), (2, 2, 40)])
def test_a_shared_row_collects_the_gradients_of_all_its_sequences(
    heads: int, groups: int, size: int, form: Form
) -> None:
    """In walks long enough for several parts, whose tasks run at once; not one bit depends on the threads."""
    for seed, sequences in ((1, 6), (2, 60)):
        own, shared = walk(seed, sequences)
        tensors = qkv(sum(own), heads, groups, size, torch.float32)
        slope = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5))
        counts = torch.tensor(shared, dtype=torch.int32)
        expected = gradients(tensors, slope, lambda inputs, own=own, shared=shared: in_full(inputs, own, shared, form))
        found = []
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            found.append(gradients(tensors, slope, lambda t, o=own, c=counts: attend(t, o, c, form)))
        for ours, theirs in zip(found[0], expected, strict=True):
            assert float((ours - theirs).abs().max()) <= 4e-6 * float(theirs.abs().max())
        if ops.path_name() != "exact-torch":
            assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_positions_after_the_shared_ones_are_not_read() -> None:
    own, counts = [40, 10], torch.tensor([0, 20], dtype=torch.int32)
    q, k, v = qkv(50, 2, 1, 32, torch.float32)
    before = attend([q, k, v], own, counts, PLAIN)
    v[20] = v[20].nextafter(torch.tensor(100.0))
    after = attend([q, k, v], own, counts, PLAIN)
    assert not torch.equal(before[20:40], after[20:40])
    assert torch.equal(before[40:], after[40:])
    v[19] = v[19].nextafter(torch.tensor(100.0))
    assert not torch.equal(attend([q, k, v], own, counts, PLAIN)[40:], after[40:])


def test_a_walk_that_does_not_fit_is_refused() -> None:
    tensors = qkv(8, 1, 1, 16, torch.float32)
    for shared in ([1, 0], [0, 6], [0, -1], [0]):
        with pytest.raises(BadInput, match="shared"):
            attend(tensors, [5, 3], torch.tensor(shared, dtype=torch.int32), PLAIN)
    with pytest.raises(BadInput, match="int32"):
        attend(tensors, [5, 3], torch.tensor([0, 5]), PLAIN)
