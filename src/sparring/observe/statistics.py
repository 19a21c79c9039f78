"""Confidence intervals of success rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

Interval = tuple[float, float]


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Score interval of a rate (Wilson 1927): never outside [0, 1], and sound at 0 and n successes.

    Args:
        successes: of `n` independent trials.
        n: at least 0; nothing is known from none, so 0 gives (0, 1).
        confidence: coverage.

    Raises:
        ValueError: not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and {n}, got {successes}")
    if n == 0:
        return (0.0, 1.0)
    z = _quantile(confidence)
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half  # exact at the ends, where rounding could leave the unit interval
    return (low, 1.0 if successes == n else centre + half)


def paired_difference(before: Sequence[bool], after: Sequence[bool], confidence: float = 0.95) -> tuple[float, Interval]:
    """The change of a success rate over the same tasks, and its interval (Agresti and Min 2005: Wald after adding 1/2
    to each cell of the 2 x 2 table, which keeps its coverage for few and for one-sided changes).

    Args:
        before: success per task.
        after: success of the same tasks in the same order.
        confidence: coverage.

    Returns:
        The plain difference of the rates, and the interval.

    Raises:
        ValueError: the sequences differ in length or are empty.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"expected two equally long sequences, got {len(before)} and {len(after)}")
    pairs = list(zip(before, after, strict=True))
    gained = sum(1 for b, a in pairs if a and not b)
    lost = sum(1 for b, a in pairs if b and not a)
    total, more, less = len(pairs) + 2, gained + 0.5, lost + 0.5
    centre = (more - less) / total
    half = _quantile(confidence) * math.sqrt((more + less) - (more - less) ** 2 / total) / total
    return (gained - lost) / len(pairs), (max(-1.0, centre - half), min(1.0, centre + half))


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)
