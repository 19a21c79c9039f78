"""Metrics add up the same however they were split."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.observe.metrics import Metrics, Reduce, merged

VALUES = st.lists(st.tuples(st.integers(-1000, 1000), st.integers(1, 9)), min_size=1, max_size=12)


def filled(values: list[tuple[int, int]]) -> Metrics:
    """Every reduction over these."""
    metrics = Metrics()
    for value, weight in values:
        metrics.add("mean", value, weight=weight)
        metrics.add("ratio", value, "ratio", weight=weight)
        for reduce in ("sum", "max", "min", "last"):
            metrics.add(reduce, value, reduce)
    return metrics


@given(values=VALUES)
def test_each_reduction_by_hand(values: list[tuple[int, int]]) -> None:
    numbers = [v for v, _ in values]
    weight = sum(w for _, w in values)
    assert filled(values).values() == {
        "mean": float(Fraction(sum(v * w for v, w in values), weight)),
        "ratio": float(Fraction(sum(numbers), weight)),
        "sum": sum(numbers),
        "max": max(numbers),
        "min": min(numbers),
        "last": numbers[-1],
    }


@given(one=VALUES, two=VALUES)
def test_merging_is_reporting_in_one_place(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    first, second = filled(one), filled(two)
    first.merge(second)
    assert first.values() == filled(one + two).values()
    assert second.values() == filled(two).values()


def test_take_starts_over() -> None:
    metrics = Metrics()
    metrics.add("a", 1.0, "sum")
    metrics.add("b", 2.0, "sum")
    assert metrics.take() == {"a": 1.0, "b": 2.0} and metrics.take() == {}


def test_a_ratio_over_zero_is_nan() -> None:
    metrics = Metrics()
    metrics.add("rate", 0, "ratio", weight=0)
    assert math.isnan(metrics.values()["rate"])


def test_a_metric_has_one_reduction() -> None:
    metrics = Metrics()
    metrics.add("a", 1)
    with pytest.raises(ValueError, match="a reduces by mean, reported as sum"):
        metrics.add("a", 1, "sum")


def test_merged_counts_add_up_per_model() -> None:
    critic = {
        "critic/tokens_trained": 5.0,
        "critic/grad_norm": 2.0,
        "critic/step_s": 0.5,
        "critic/logprob_max_abs_diff": 1.0,
    }
    policy = {"tokens_trained": 3.0, "grad_norm": 1.0, "step_s": 0.25}
    found = merged([critic, policy, {**critic, "critic/grad_norm": 4.0, "critic/logprob_max_abs_diff": 0.5}, policy])
    assert (found["critic/tokens_trained"], found["tokens_trained"]) == (10.0, 6.0)
    assert (found["critic/grad_norm"], found["grad_norm"]) == (3.0, 1.0), "each is a mean over its own steps"
    assert (found["critic/step_s"], found["step_s"]) == (1.0, 0.5)
    assert found["critic/logprob_max_abs_diff"] == 1.0 and found["optimiser_steps"] == 4.0


def test_a_single_step_is_merged_unchanged() -> None:
    assert merged([{"tokens_trained": 3.0}]) == {"tokens_trained": 3.0}


class _Scalar:
    """A scalar as array libraries have them: of shape (), with `item`."""

    shape = ()

    def __init__(self, plain: object) -> None:
        self._plain = plain

    def item(self) -> object:
        return self._plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (_Scalar(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(-2), -2.0),
        (np.array(7), 7.0),
        (math.inf, math.inf),
        (Decimal("-Infinity"), -math.inf),
    ],
)
@pytest.mark.parametrize("reduce", get_args(Reduce))
def test_whatever_is_a_number_is_kept_as_a_float(value: object, expected: float, reduce: Reduce) -> None:
    metrics = Metrics()
    metrics.add("a", value, reduce)
    [(name, kept)] = metrics.values().items()
    assert (name, type(kept), kept) == ("a", float, expected)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({name: kept}), type=dict[str, float]) == {name: expected}


@pytest.mark.parametrize(
    "value", ["1", None, 1j, [1.0], np.ones(1), np.str_("1"), _Scalar("1"), 10**400, Decimal("sNaN"), b"1"]
)
def test_whatever_is_none_is_refused_by_name(value: object) -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="^expected a number as metric rollout/part/style, got "):
        metrics.add("rollout/part/style", value)
    assert metrics.values() == {}


def test_an_update_of_one_step_has_numbers_too() -> None:
    [(name, kept)] = merged([{"updated": True}]).items()
    assert (name, type(kept), kept) == ("updated", float, 1.0)
    with pytest.raises(ValueError, match="metric loss, got 'low'"):
        merged([{"loss": "low"}])  # type: ignore[dict-item]
