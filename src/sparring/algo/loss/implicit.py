"""Preference term of an implicit process reward model: a language model that learns which rollouts were right.

Shapes: M weighted tokens of a micro-batch, G trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import per_pair, replies
from sparring.annotations import Annotation
from sparring.protocols import LossResult, Needs


class ImplicitReward:
    """Cross-entropy of outcome labels, the loss of PRIME's reward model (Cui et al., arXiv 2502.01456, section 3).

        r_i  = beta * sum_t (log pi(y_i,t) - log reference(y_i,t))        over all sampled tokens of trajectory i
        loss = - sum_i weight_i * (o_i * log sigmoid(r_i) + (1 - o_i) * log sigmoid(-r_i)) / denominator

    o_i is 1 for the label 1 and 0 for the label -1; beta is the setting of credit `prime`. The rows of one `group` are
    one trajectory, which no micro-batch splits; its token weights sum to weight_i. Implements `Loss`.
    """

    term = "preference"
    needs = Needs(quantities=frozenset({"logprob"}), unit="pair")

    def __init__(self, *, beta: float = 0.05) -> None:
        self.beta = beta

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss from `logprob` [M] float32 with gradient and the annotation `reference`.

        Returns:
            A scalar, and as (sum, count) over trajectories the metrics accuracy (share of rewards with the label's
                sign; 0 counts half), reward_chosen and reward_rejected (r of right and of wrong trajectories).
        """
        weights = micro_batch.weights[self.term]
        weighted = weights != 0
        _, which = micro_batch.group[micro_batch.rows].unique(return_inverse=True)
        which = torch.where(weighted, which, -1)
        of_each = per_pair(weights, which)
        sums = replies(quantities["logprob"], micro_batch.annotations[Annotation.REFERENCE], which, len(of_each))
        reward = self.beta * (sums.logprob - sums.reference)
        of_token = micro_batch.label.to(reward.dtype)[micro_batch.rows[weighted]]
        label = reward.new_zeros(len(of_each)).index_copy(0, which[weighted], of_token)
        loss = -(of_each * logsigmoid(label * reward)).sum() / micro_batch.denominators[self.term]
        return LossResult(loss=loss, metrics=_metrics(reward.detach().double(), label))


def _metrics(reward: torch.Tensor, label: torch.Tensor) -> dict[str, tuple[float, float]]:
    side = reward * label
    metrics: dict[str, tuple[float, float]] = {
        "accuracy": (float((side > 0).double().sum() + 0.5 * (side == 0).double().sum()), len(label))
    }
    for name, chosen in (("reward_chosen", label > 0), ("reward_rejected", label < 0)):
        metrics[name] = (float(reward[chosen].sum()), int(chosen.sum()))
    return metrics
