"""Global denominators of the loss terms."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sparring.types import Sample


def denominators(rows: Iterable[Sample], *, policy: float | None = None) -> dict[str, float]:
    """Sum the weights of each term over all rows of an update, rounded correctly, so that the order of rows does not
    matter. `policy`, if given, replaces the policy term's sum. Raises ValueError for a sum of 0 or less.

    With weights of 1 the sum is the number of tokens (token mean); with weights that sum to 1 per trajectory, the
    number of trajectories (sequence mean). A term without weighted tokens is absent. Rows with label 0, which are only
    evaluated and not trained, do not count.
    """
    weights: dict[str, list[float]] = {}
    for row in rows:
        for term, values in row.weights.items() if row.label != 0 else ():
            weights.setdefault(term, []).extend(values)
    totals = {term: math.fsum(values) for term, values in weights.items() if any(values)}
    if wrong := [term for term, total in totals.items() if total <= 0]:
        raise ValueError(f"expected weights of {wrong} that sum to more than 0 over the update, got a sum of 0 or less")
    return totals if policy is None or "policy" not in totals else {**totals, "policy": policy}
