"""Aggregation: the weight of each token, and the divisor of the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from sparring.types import Sample

if TYPE_CHECKING:
    import torch

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
"""With T_i sampled tokens of trajectory i, G trajectories and l a token's loss:

    token_mean      sum_i sum_t l / sum_i T_i                   DAPO's code (verl's "token-mean"); equation 8 of arXiv
                                                                2503.14476 divides each prompt's answers by their own
                                                                tokens and takes the mean over prompts
    sequence_mean   sum_i (sum_t l / T_i) / G                   GRPO (arXiv 2402.03300, equation 3)
    sequence_sum    sum_i sum_t l / G                           with a sequence's ratio its loss times its length: LUSPO
    constant        sum_i sum_t l / (G L), L `max_tokens`       Dr. GRPO (arXiv 2503.20783, section 3.2)

Sums are over all trajectories of an optimiser step, those of groups in which all advantages are 0 too.
"""


def aggregated(rows: Sequence[Sample], how: Aggregation, max_tokens: int) -> list[Sample]:
    """Return the rows of one group with each token's share of the sum as its policy weight.

    All branches of a trajectory count as one sequence.
    """
    if how in ("token_mean", "sequence_sum"):
        return list(rows)
    lengths: Counter[str] = Counter()
    for row in rows:
        lengths[row.trajectory] += len(row.tokens) - row.weights["policy"].count(0.0)
    counted_rows = []
    for row in rows:
        length = lengths[row.trajectory] if how == "sequence_mean" else max_tokens
        weights = tuple([weight / length for weight in row.weights["policy"]])
        counted_rows.append(replace(row, weights={**row.weights, "policy": weights}))
    return counted_rows


def denominator(rows: Iterable[Sample], how: Aggregation) -> float | None:
    """Return the divisor of the policy term of an update with these rows; None: the sum of its weights."""
    if how in ("token_mean", "sequence_mean"):
        return None
    return float(len({row.trajectory for row in rows if any(row.weights.get("policy", ()))}))


def recounted(
    weights: torch.Tensor, kept_mask: torch.Tensor, trajectories: torch.Tensor, how: Aggregation
) -> torch.Tensor:
    """Compute factors of the weights of an optimiser step's M tokens so that only kept tokens count.

    The loss is then divided by as much as if the others had not been sampled: by the kept tokens, or by the
    trajectories of which any is kept, each as long as what is kept of it. Exactly 1 where all are kept.

    Args:
        weights: [M] weight of each token, 0 where the term does not weigh it.
        kept_mask: [M] bool.
        trajectories: [M] int64, the trajectory that the token is in, from 0.
        how: the aggregation that the weights are of.

    Returns:
        [M]; 0 for tokens that are not kept.
    """
    left = weights * kept_mask
    if how == "token_mean":
        return kept_mask * (weights.sum() / _or_one(left.sum()))
    count = int(trajectories.max()) + 1 if len(trajectories) else 0
    before, after = (weights.new_zeros(count).index_add(0, trajectories, column) for column in (weights, left))
    counted, left_over = ((column > 0).to(weights.dtype).sum() for column in (before, after))
    longer = (before / _or_one(after))[trajectories] if how == "sequence_mean" else 1.0
    return kept_mask * (counted / _or_one(left_over)) * longer


def _or_one(values: torch.Tensor) -> torch.Tensor:
    """Return the values, and 1 where they are 0."""
    return values.masked_fill(values == 0, 1)
