"""Statistics of a group. Sums are correctly rounded, so no result depends on the order of members; values that differ
only by rounding count as equal (`types.alike`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparring.types import alike


def mean(values: Sequence[float]) -> float:
    """Compute the mean of at least one value."""
    return math.fsum(values) / len(values)


def centred(values: Sequence[float]) -> list[float]:
    """Subtract the mean. All results are exactly 0 if all values are equal, even if their mean is rounded."""
    if alike(values):
        return [0.0] * len(values)
    middle = mean(values)
    return [value - middle for value in values]


def deviation(values: Sequence[float], *, lost: int = 1) -> float:
    """Compute the standard deviation over n - `lost` for n values; exactly 0 if all values are equal."""
    if alike(values):
        return 0.0
    return math.sqrt(math.fsum(c * c for c in centred(values)) / (len(values) - lost))


def standardised(values: Sequence[float], *, epsilon: float, lost: int = 1) -> list[float]:
    """Compute (value - mean) / (standard deviation + epsilon); exactly 0 if all values are equal."""
    scale = deviation(values, lost=lost) + epsilon
    return [c / scale for c in centred(values)]


def against_others(values: Sequence[float]) -> list[float]:
    """Compute each value less the mean of the others; exactly 0 if all values are equal. Needs at least two values.

    x_i - (S - x_i) / (n - 1) = n / (n - 1) * (x_i - S / n), with S the sum of n values.
    """
    return [len(values) / (len(values) - 1) * c for c in centred(values)]
