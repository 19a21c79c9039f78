"""Rows of numbers: what tuples of them do, in a third of the memory."""

from __future__ import annotations

import math
import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.generation import NumberRow, Runs
from sparring.store.codec import decode, encode
from sparring.types import Segment

IDS = st.lists(st.integers(0, 2**40)).map(tuple)
FLOATS = st.lists(st.floats(allow_nan=False)).map(tuple)


@given(IDS, IDS, st.slices(8))
def test_a_row_of_ids_does_what_the_tuple_does(ids: tuple[int, ...], others: tuple[int, ...], cut: slice) -> None:
    row = NumberRow.of_tokens(ids)
    assert row == ids and ids == row and not (row != ids) and row == NumberRow.of_tokens([*ids])  # noqa: SIM202
    assert hash(row) == hash(ids) and {ids: 1}[row] == 1  # type: ignore[index]
    assert (row == others) == (ids == others) and row != [*ids]
    assert [len(row), *row, *map(type, row)] == [len(ids), *ids, *map(type, ids)]
    assert row[cut] == ids[cut] and type(row[cut]) is tuple
    assert row + others == ids + others and others + row == others + ids and row + row == ids + ids
    assert [(row.count(value), row.index(value), value in row) for value in ids] == [
        (ids.count(value), ids.index(value), True) for value in ids
    ]
    assert repr(row) == repr(ids) and row.tolist() == [*ids] and pickle.loads(pickle.dumps(row)) == row
    assert bool(row) == bool(ids) and NumberRow.of_tokens(row) is row


@given(FLOATS)
def test_floats_come_back_to_the_bit(values: tuple[float, ...]) -> None:
    assert list(map(math.copysign, NumberRow.of_floats(values), values)) == [*values]
    assert encode(NumberRow.of_floats(values)) == encode(values)


def segment_of(count: int, *, start: int = 1000) -> Segment:
    return Segment(
        index=0,
        parent=None,
        source="policy",
        tokens=tuple(range(start, start + count)),
        model="policy",
        logprobs=tuple(-1.0 / (place + 1) for place in range(count)),
        versions=Runs.of(3, count),
        kv_versions=Runs.of(3, count),
    )


def test_a_segment_is_written_as_it_was_when_it_held_tuples_and_comes_back_equal() -> None:
    segment = segment_of(3)
    before = encode(segment)
    segment.compact()
    written = encode(segment)
    assert written == before and segment == segment_of(3)
    plain = {"tokens": (1000, 1001, 1002), "logprobs": (-1.0, -0.5, -1 / 3)}
    assert decode(written, dict)["tokens"] == [*plain["tokens"]]
    assert written == encode({**decode(written, dict), **plain})
    again = decode(written, Segment)
    assert (
        again == segment == segment_of(3) and type(again.tokens) is tuple and hash(again.tokens) == hash(segment.tokens)
    )
    assert type(segment.tokens) is type(segment.logprobs) is NumberRow


def test_ids_take_four_bytes_and_log_probabilities_eight() -> None:
    tracemalloc.start()
    segment = segment_of(10_000)
    segment.compact()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12.5 * 10_000


def test_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(TypeError):
        NumberRow.of_tokens(("a",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="NoneType"):
        NumberRow.of_floats((None,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plain data"):
        encode(object())
