"""Aggregation: what each token counts, and what the sum is divided by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from sparring.types import Sample

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
"""With T_i sampled tokens of trajectory i, G trajectories and l a token's loss:

    token_mean      sum_i sum_t l / sum_i T_i                   DAPO (arXiv 2503.14476, equation 8)
    sequence_mean   sum_i (sum_t l / T_i) / G                   GRPO (arXiv 2402.03300, equation 3)
    sequence_sum    sum_i sum_t l / G                           with a sequence's ratio its loss times its length: LUSPO
    constant        sum_i sum_t l / (G L), L `max_tokens`       Dr. GRPO (arXiv 2503.20783, section 3.2)
"""


def aggregated(rows: Sequence[Sample], how: Aggregation, max_tokens: int) -> list[Sample]:
    """The rows of one group with what each token counts as its policy weight. All branches of a trajectory count as one
    sequence."""
    if how in ("token_mean", "sequence_sum"):
        return list(rows)
    lengths: Counter[str] = Counter()
    for row in rows:
        lengths[row.trajectory] += len(row.tokens) - row.weights["policy"].count(0.0)
    found = []
    for row in rows:
        length = lengths[row.trajectory] if how == "sequence_mean" else max_tokens
        weights = tuple([weight / length for weight in row.weights["policy"]])
        found.append(replace(row, weights={**row.weights, "policy": weights}))
    return found


def denominator(rows: Iterable[Sample], how: Aggregation) -> float | None:
    """What the policy term of an update with these rows is divided by; None: by the sum of its weights."""
    if how in ("token_mean", "sequence_mean"):
        return None
    return float(len({row.trajectory for row in rows if any(row.weights.get("policy", ()))}))
