"""Value term of a process reward model, which learns whether each step of a solution is right.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from sparring.annotations import Annotation
from sparring.protocols import LossResult, Needs


class StepLabels:
    """Cross-entropy at the ends of steps (Lightman et al., arXiv 2305.20050, with two classes; labels between 0 and 1
    as in Math-Shepherd, arXiv 2312.08935).

        loss = - sum_t weight_t * (y_t * log sigmoid(v_t) + (1 - y_t) * log sigmoid(-v_t)) / denominator

    v_t is the head's value at a weighted token, the last of a step: the logit of the probability that this step is
    right. Implements `Loss`.
    """

    term = "value"
    needs = Needs(quantities=frozenset({"value"}))

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss: a scalar from `value` [M] float32 with gradient.

        The metric accuracy is the share of steps with sigmoid(v_t) on the label's side of one half; ties count half.
        """
        weights, values = micro_batch.weights[self.term], quantities["value"]
        label = micro_batch.annotations[Annotation.STEP_LABEL].to(values.dtype)
        wrong = -(label * logsigmoid(values) + (1.0 - label) * logsigmoid(-values))
        loss = (weights * wrong).sum() / micro_batch.denominators[self.term]
        weighted = weights != 0
        side = (values.detach() * (label - 0.5))[weighted]
        right = float((side > 0).double().sum() + 0.5 * (side == 0).double().sum())
        return LossResult(loss=loss, metrics={"accuracy": (right, int(weighted.sum()))})
