"""Intervals against published numbers, their definitions and exact coverage."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.observe.statistics import paired_difference, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(n=st.integers(1, 500), data=st.data())
def test_wilson_is_a_sound_interval(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low))
    for end in (low, high):  # the ends are where the score test just rejects
        if 0 < end < 1:
            assert abs(successes / n - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), rel=1e-4)


def test_wilson_covers_as_often_as_it_says() -> None:
    n = 60
    for rate in (0.1, 0.5, 0.8):
        covered = sum(
            math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1) if wilson(k, n)[0] <= rate <= wilson(k, n)[1]
        )
        assert 0.92 < covered < 0.98


def test_nothing_is_known_from_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="between 0 and 3"):
        wilson(4, 3)


def test_a_paired_difference_by_hand() -> None:
    # 40 both, 30 gained, 6 lost, 24 neither: difference 24 / 100; with half a success added to each cell
    before = [True] * 40 + [False] * 30 + [True] * 6 + [False] * 24
    after = [True] * 40 + [True] * 30 + [False] * 6 + [False] * 24
    difference, (low, high) = paired_difference(before, after)
    half = 1.959964 * math.sqrt((30.5 + 6.5) - 24**2 / 102) / 102
    assert difference == 0.24 and (low, high) == pytest.approx((24 / 102 - half, 24 / 102 + half), abs=1e-6)


def test_a_paired_difference_covers_as_often_as_it_says() -> None:
    n, gain, loss = 50, 0.2, 0.1
    covered = 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            same = n - gained - lost
            chance = (
                math.comb(n, gained) * math.comb(n - gained, lost) * gain**gained * loss**lost * (1 - gain - loss) ** same
            )
            if chance < 1e-9:
                continue
            before = [False] * gained + [True] * lost + [True] * same
            after = [True] * gained + [False] * lost + [True] * same
            low, high = paired_difference(before, after)[1]
            covered += chance * (low <= gain - loss <= high)
    assert 0.93 < covered < 0.98


def test_a_paired_difference_needs_pairs() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_difference([True], [True, False])
    with pytest.raises(ValueError, match="got 0 and 0"):
        paired_difference([], [])
