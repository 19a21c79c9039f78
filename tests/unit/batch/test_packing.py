"""Packing keeps every row whole, once, within the budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.batch.packing import pack
from sparring.types import Sample


def make_row(index, length):
    return Sample(id=str(index), group="g", source="policy", tokens=(0,) * length, weights={})


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_every_row_is_packed_once_and_whole(lengths, budget):
    rows = [make_row(i, length) for i, length in enumerate(lengths)]
    packed = pack(rows, budget)
    assert sorted((row for part in packed for row in part), key=lambda row: int(row.id)) == rows
    for part in packed:
        assert len(part) == 1 or sum(len(row.tokens) for row in part) <= budget
        assert [int(row.id) for row in part] == sorted(int(row.id) for row in part)
    assert [int(part[0].id) for part in packed] == sorted(int(part[0].id) for part in packed)
    assert pack(rows, budget) == packed


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 80))
def test_at_most_one_micro_batch_is_half_empty(lengths, budget):
    parts = pack([make_row(i, length) for i, length in enumerate(lengths)], budget)
    loads = [sum(len(row.tokens) for row in part) for part in parts]
    assert sum(load * 2 <= budget for load in loads) <= 1


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget"):
        pack([], 0)
