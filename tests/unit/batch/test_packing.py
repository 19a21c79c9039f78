"""Packing keeps every row whole, once, within the budget; what rows begin with in common counts once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.batch.packing import SMALLEST_PIECE, lanes, pack
from sparring.types import Sample


def make_row(index, tokens):
    return Sample(id=str(index), group="g", source="policy", tokens=tuple(tokens), weights={})


def make_rows(lengths, apart=100):
    """Rows that share nothing, of lengths up to `apart`."""
    return [make_row(i, range(apart * i, apart * i + length)) for i, length in enumerate(lengths)]


ROWS = st.lists(st.integers(1, 20), max_size=60).map(make_rows) | st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=40
).map(lambda forest: [make_row(i, tokens) for i, tokens in enumerate(forest)])


def load(part):
    return len({row.tokens[: end + 1] for row in part for end in range(len(row.tokens))})


def cost(part, context):
    """The same by its definition: one for each distinct prefix, and for what its last token attends to."""
    prefixes = {row.tokens[: end + 1] for row in part for end in range(len(row.tokens))}
    return sum(1 + ((len(prefix) - 0.5) / context if context else 0.0) for prefix in prefixes)


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


def test_groups_stay_together_and_pay_their_prefix_once():
    header = tuple(range(100, 140))
    prompts = [(*header, *range(200 + 10 * group, 210 + 10 * group)) for group in range(2)]
    rows = [make_row(i, (*prompts[i % 2], 300 + i, 400 + i)) for i in range(8)]
    assert [ids(part) for part in pack(rows, 40 + 2 * (10 + 4 * 2))] == [list(range(8))]
    assert [ids(part) for part in pack(rows, 40 + 10 + 4 * 2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_rows_without_shared_prefixes_are_packed_tightly():
    draw = random.Random(0)
    for _ in range(20):
        lengths = [min(500, round(draw.lognormvariate(4.0, 0.8))) for _ in range(100)]
        assert len(pack(make_rows(lengths, 1000), 600)) <= -(-1.01 * sum(lengths) // 600)
    # in the order given, first-fit and best-fit take three
    assert sorted(map(ids, pack(make_rows([40, 40, 60, 60]), 100))) == [[0, 2], [1, 3]]


def test_groups_are_split_if_that_takes_fewer_micro_batches():
    rows = [
        make_row(
            4 * g + i, (*range(1000 * g, 1000 * g + 4), *range(1000 * g + 100 * i + 100, 1000 * g + 100 * i + 115))
        )
        for g in range(4)
        for i in range(4)
    ]
    assert {load(rows[4 * g : 4 * g + 4]) for g in range(4)} == {64}
    assert len(pack(rows, 100)) == 3


def test_lanes_hold_every_row_once_at_nearly_equal_cost():
    draw = random.Random(0)
    rows = make_rows([min(900, round(draw.lognormvariate(5.0, 0.7))) for _ in range(64)], 1000)
    for context in (0.0, 200.0):
        for count in (2, 4, 8):
            parts = lanes(rows, count, context)
            assert len(parts) == count and lanes(rows, count, context) == parts
            assert sorted((row for part in parts for row in part), key=lambda row: int(row.id)) == rows
            costs = [cost(part, context) for part in parts]
            assert max(costs) < 1.02 * sum(costs) / count
    long = [*make_rows([300] * 4, 1000), *(make_row(4 + i, range(9000 + 10 * i, 9010 + 10 * i)) for i in range(120))]
    assert [sum(len(row.tokens) == 300 for row in part) for part in lanes(long, 4, 10.0)] == [1] * 4


def test_lanes_keep_groups_together():
    groups = [tuple(range(1000 * group, 1000 * group + 30)) for group in range(6)]
    rows = [make_row(i, (*groups[i % 6], *range(20_000 + 100 * i, 20_040 + 100 * i))) for i in range(24)]
    for count in (2, 3):
        assert [load(part) for part in lanes(rows, count)] == [load(rows) // count] * count
    uneven = lanes([*rows, *[make_row(24 + i, range(50_000, 50_100)) for i in range(3)]], 2)
    assert len(uneven) == 2 and max(map(load, uneven)) < 0.6 * sum(map(load, uneven))


def test_lanes_leave_a_small_micro_batch_a_single_row_and_a_long_common_prefix_whole():
    small = make_rows([SMALLEST_PIECE - 1, SMALLEST_PIECE], 1000)
    assert lanes(small, 2) == [small]
    assert lanes(small[:1], 2) == [small[:1]]
    rows = [make_row(0, range(4 * SMALLEST_PIECE))]
    assert lanes(rows, 2) == [rows]
    assert lanes(rows, 1) == [rows]
    assert len(lanes(make_rows([SMALLEST_PIECE, SMALLEST_PIECE], 1000), 2)) == 2
    for prefix, count in ((50, 2), (1000, 1)):
        rows = [make_row(i, (*range(prefix), *range(10_000 * i + 2000, 10_000 * i + 2200))) for i in range(10)]
        assert len(lanes(rows, 2)) == count


def test_a_count_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget"):
        pack([], 0)
