"""Rewards that differ by rounding alone are alike; all others are not."""

import pytest

from sparring.types import alike


@pytest.mark.parametrize(
    "rewards",
    [
        [],
        [0.5],
        [None, None],
        [0.1 + 0.2, 0.3],
        [0.3 - 0.1 - 0.2, 0.0],
        [1e6 + 1e-6, 1e6],
        [-0.1 - 0.2, -0.3],
        [float("inf")] * 2,
    ],
)
def test_what_rounding_may_make(rewards):
    assert alike(rewards)


@pytest.mark.parametrize(
    "rewards",
    [[0.0, 1e-9], [1.0, 1.0 + 1e-6], [None, 0.0], [123_456_788.0, 123_456_789.0], [-1e-6, 1e-6], [0.0, float("inf")]],
)
def test_what_it_may_not(rewards):
    assert not alike(rewards)
