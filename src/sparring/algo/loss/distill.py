"""Distillation term: pulls the model's distribution towards a teacher's, on tokens that the model itself sampled.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from sparring.algo.tokens import bounded
from sparring.annotations import Annotation
from sparring.protocols import Divergence, LossResult, Needs

Estimator = Literal["policy_gradient", "squared"]


class SampledDistillLoss:
    """Reverse KL, E_q[log q - log p], estimated from the teacher's log-probability of each sampled token.

        gap_t            = logprob_t - teacher_t
        policy_gradient    loss = - sum_t weight_t * min(ratio_t, cap) * stop_gradient(-gap_t) / denominator
        squared            loss =   sum_t weight_t * gap_t^2 / 2 / denominator

    `policy_gradient` takes teacher_t - logprob_t as the advantage of token t alone, with a discount of 0 (on-policy
    distillation: Lu and Thinking Machines Lab, 2025). ratio_t = exp(logprob_t - behaviour_t) is exactly 1 if the
    current weights sampled the token. It is truncated at `cap` as in V-trace (arXiv 1802.01561, section 4.1), so a
    truncated token still has a gradient. `squared` is k2 of http://joschu.net/blog/kl-approx.html. It can be
    differentiated directly: its gradient, gap_t * grad logprob_t, is the same, while the gradient of gap_t itself is 0
    in expectation (arXiv 2506.09477).
    """

    term = "distill"
    needs = Needs(quantities=frozenset({"logprob"}))

    def __init__(self, estimator: Estimator = "policy_gradient", *, ratio_cap: float = 2.0) -> None:
        self._estimator = estimator
        self._ratio_cap = ratio_cap

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss: a scalar from `logprob` [M] with gradient, the annotation `teacher` and
        the recorded log-probabilities. The metric `distill_gap` is the mean of gap_t, which the update minimises."""
        weights, logprob = micro_batch.weights[self.term], quantities["logprob"]
        gap = logprob - micro_batch.annotations[Annotation.TEACHER]
        if self._estimator == "squared":
            losses = gap.square() / 2
        else:
            ratio = bounded(logprob - micro_batch.behaviour_logprobs).exp()
            losses = ratio * (self._ratio_cap / ratio.detach()).clamp(max=1.0) * gap.detach()
        loss = (weights * losses).sum() / micro_batch.denominators[self.term]
        weighted = weights != 0
        return LossResult(
            loss=loss, metrics={"distill_gap": (gap.detach()[weighted].sum().item(), float(weighted.sum()))}
        )


class DistillLoss:
    """Divergence between a teacher's distribution and the model's at each token. The distributions are over the whole
    vocabulary, or over the teacher's likeliest tokens and one class for all other tokens.

        loss = sum_t weight_t * divergence_t / denominator

    GKD, arXiv 2306.13649, section 3, on the model's own samples and without a gradient through the sampling.
    """

    term = "distill"

    def __init__(self, divergence: Divergence) -> None:
        self.needs = Needs(quantities=frozenset({"divergence"}), divergence=divergence)

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss: a scalar from `divergence` [M] with gradient. The metric `divergence` is
        its mean."""
        weights, divergence = micro_batch.weights[self.term], quantities["divergence"]
        loss = (weights * divergence).sum() / micro_batch.denominators[self.term]
        weighted = weights != 0
        return LossResult(
            loss=loss, metrics={"divergence": (divergence.detach()[weighted].sum().item(), float(weighted.sum()))}
        )
