"""Bradley-Terry model of preferences: a scalar head learns a reward.

Shapes: M weighted tokens of a micro-batch, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import pair_metrics, per_pair, sides
from sparring.annotations import Annotation
from sparring.kernels.threads import add_at
from sparring.protocols import LossResult, Needs


class BradleyTerry:
    """Loss of a reward model over pairs, after Ouyang et al. (arXiv 2203.02155, equation 1).

        loss = sum_p weight_p * (-log sigmoid(r_chosen - r_rejected - margin)
                                 + centre * (r_chosen + r_rejected)^2) / denominator

    r is the head's value at the one weighted token of a row. The paper puts all pairs of a prompt into one batch; here
    each pair is a unit of its own, with its weight. The margin follows Llama 2 (arXiv 2307.09288, equation 2). `centre`
    keeps the rewards, which are determined only up to a constant, near zero (Eisenstein et al., arXiv 2312.09244).
    Implements `Loss`.
    """

    term = "preference"
    needs = Needs(quantities=frozenset({"value"}), unit="pair")

    def __init__(self, *, centre: float = 0.0) -> None:
        self.centre = centre

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss: a scalar from `value` [M] float32 with gradient. Metrics as in
        `PairLoss`."""
        weights, values = micro_batch.weights[self.term], quantities["value"]
        pair, side = sides(micro_batch, weights)
        paired = pair >= 0
        of_pair = per_pair(weights, pair)
        places = (pair * 2 + side)[paired]
        rewards = add_at(places, values[paired], 2 * len(of_pair)).view(-1, 2)
        margin = rewards[:, 0] - rewards[:, 1]
        if Annotation.MARGIN in micro_batch.annotations:
            margins = micro_batch.annotations[Annotation.MARGIN].to(values.dtype)
            of_side = add_at(places, margins[paired], 2 * len(of_pair)).view(-1, 2)
            margin = margin - of_side[:, 0]
        wrong = self.centre * rewards.sum(1) ** 2 - logsigmoid(margin)
        loss = (of_pair * wrong).sum() / micro_batch.denominators[self.term]
        return LossResult(loss=loss, metrics=pair_metrics(rewards.detach()))
