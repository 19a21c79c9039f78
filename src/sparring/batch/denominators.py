"""The global denominator of each loss term."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sparring.types import Sample


def denominators(rows: Iterable[Sample], *, policy: float | None = None) -> dict[str, float]:
    """Sum all weights per term over all rows of an update, correctly rounded whatever the order; for the policy term
    return `policy`, if that is given.

    Weights say how much a token counts, so this one rule is the token mean (weights of 1: number of tokens) and the
    sequence mean (weights that sum to 1 per trajectory: number of trajectories). A term that weighs no token is absent.
    Rows of label 0, which are judged and not trained, do not count.

    Raises:
        ValueError: a term's weights sum to zero or less, so that nothing can be divided by them.
    """
    weights: dict[str, list[float]] = {}
    for row in rows:
        for term, values in row.weights.items() if row.label != 0 else ():
            weights.setdefault(term, []).extend(values)
    totals = {term: math.fsum(values) for term, values in weights.items() if any(values)}
    if wrong := [term for term, total in totals.items() if total <= 0]:
        raise ValueError(f"expected weights of {wrong} that sum to more than 0 over the update, got a sum of 0 or less")
    return totals if policy is None or "policy" not in totals else {**totals, "policy": policy}
