"""Aggregation of token losses: the weight of each token and the divisor of their sum."""

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
                                                                2503.14476 takes the mean over the tokens of each
                                                                prompt's answers, then the mean over prompts
    sequence_mean   sum_i (sum_t l / T_i) / G                   GRPO (arXiv 2402.03300, equation 3)
    sequence_sum    sum_i sum_t l / G                           LUSPO, with the sequence ratio (arXiv 2602.05261)
    constant        sum_i sum_t l / (G L), L `max_tokens`       Dr. GRPO (arXiv 2503.20783, section 3.2)

Sums run over all trajectories of an optimiser step. Groups with advantages of 0 count too.
"""


def aggregated(rows: Sequence[Sample], how: Aggregation, max_tokens: int) -> list[Sample]:
    """Divide the policy weights of one group's rows by the length that the aggregation prescribes.

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
    """Return the divisor of an update's policy term: its number of trajectories; None if it is the sum of weights."""
    if how in ("token_mean", "sequence_mean"):
        return None
    return float(len({row.trajectory for row in rows if any(row.weights.get("policy", ()))}))


def recounted(
    weights: torch.Tensor, kept_mask: torch.Tensor, trajectories: torch.Tensor, how: Aggregation
) -> torch.Tensor:
    """Compute factors [M] for the weights of an optimiser step's M tokens so that only kept tokens count; 0 for the
    others.

    The loss is then divided as if the other tokens had not been sampled: by the number of kept tokens, or by the number
    of trajectories with a kept token, whose lengths are then their numbers of kept tokens. All factors are exactly 1 if
    every token is kept.

    Args:
        weights: [M] weight of each token in the policy term; 0 outside it.
        kept_mask: [M] bool, tokens that a mask lets through.
        trajectories: [M] int64, number of the token's trajectory, from 0.
    """
    kept_weights = weights * kept_mask
    if how == "token_mean":
        return kept_mask * (weights.sum() / _nonzero(kept_weights.sum()))
    from sparring.kernels.threads import add_at

    count = int(trajectories.max()) + 1 if len(trajectories) else 0
    weighted_lengths, kept_lengths = (add_at(trajectories, column, count) for column in (weights, kept_weights))
    weighted_count, kept_count = ((column > 0).to(weights.dtype).sum() for column in (weighted_lengths, kept_lengths))
    lengthening = (weighted_lengths / _nonzero(kept_lengths))[trajectories] if how == "sequence_mean" else 1.0
    return kept_mask * (weighted_count / _nonzero(kept_count)) * lengthening


def _nonzero(values: torch.Tensor) -> torch.Tensor:
    """Replace zeros by ones, so that the result can be a divisor."""
    return values.masked_fill(values == 0, 1)
