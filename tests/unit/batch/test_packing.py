"""Packing keeps every row whole, once, within the budget; what rows begin with in common counts once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.batch.packing import SMALLEST_PIECE, cut, pack
from sparring.types import Sample


def make_row(index, tokens):
    return Sample(id=str(index), group="g", source="policy", tokens=tuple(tokens), weights={})


def make_rows(lengths):
    """Rows that share nothing."""
    return [make_row(i, range(100 * i, 100 * i + length)) for i, length in enumerate(lengths)]


ROWS = st.lists(st.integers(1, 20), max_size=60).map(make_rows) | st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=40
).map(lambda forest: [make_row(i, tokens) for i, tokens in enumerate(forest)])


def load(part):
    return len({row.tokens[: end + 1] for row in part for end in range(len(row.tokens))})


def ids(part):
    return [int(row.id) for row in part]


@given(ROWS, st.integers(1, 80))
def test_every_row_is_packed_once_and_whole(rows, budget):
    packed = pack(rows, budget)
    assert sorted((row for part in packed for row in part), key=lambda row: int(row.id)) == rows
    for part in packed:
        assert len(part) == 1 or load(part) <= budget
        assert ids(part) == sorted(ids(part))
    assert [ids(part)[0] for part in packed] == sorted(ids(part)[0] for part in packed)
    assert pack(rows, budget) == packed


@given(ROWS, st.integers(20, 80))
def test_at_most_one_micro_batch_is_half_empty(rows, budget):
    assert sum(load(part) * 2 <= budget for part in pack(rows, budget)) <= 1


def test_groups_stay_together_and_the_common_part_is_paid_once():
    header = tuple(range(100, 140))
    prompts = [(*header, *range(200 + 10 * group, 210 + 10 * group)) for group in range(2)]
    rows = [make_row(i, (*prompts[i % 2], 300 + i, 400 + i)) for i in range(8)]
    assert [ids(part) for part in pack(rows, 40 + 2 * (10 + 4 * 2))] == [list(range(8))]
    assert [ids(part) for part in pack(rows, 40 + 10 + 4 * 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_lanes_cut_a_micro_batch_in_the_middle_and_between_groups():
    groups = [tuple(range(1000 * group, 1000 * group + 30)) for group in range(6)]
    rows = [make_row(i, (*groups[i % 6], *range(20_000 + 100 * i, 20_040 + 100 * i))) for i in range(24)]
    whole = rows
    assert cut(rows, 1) == [rows]
    halves = cut(rows, 2)
    assert [load(part) for part in halves] == [load(whole) // 2] * 2
    assert sorted(i for part in halves for i in ids(part)) == ids(whole)
    thirds = cut(rows, 3)
    assert [load(part) for part in thirds] == [load(whole) // 3] * 3
    uneven = cut([*rows, *[make_row(24 + i, range(50_000, 50_100)) for i in range(3)]], 2)
    assert len(uneven) == 2 and max(map(load, uneven)) < 0.6 * sum(map(load, uneven))


def test_lanes_leave_a_small_micro_batch_and_a_single_row_whole():
    small = make_rows([SMALLEST_PIECE - 1, SMALLEST_PIECE])
    assert cut(small, 2) == [small]
    assert cut(small[:1], 2) == [small[:1]]
    rows = [make_row(0, range(4 * SMALLEST_PIECE))]
    assert cut(rows, 2) == [rows]
    assert len(cut(make_rows([SMALLEST_PIECE, SMALLEST_PIECE]), 2)) == 2


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget"):
        pack([], 0)
