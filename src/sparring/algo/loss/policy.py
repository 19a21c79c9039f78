"""The policy term: a clipped surrogate on the probability ratio to the policy that sampled.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.algo.config import GrpoConfig
from sparring.algo.correction.none import NoCorrection
from sparring.protocols import Correction, LossResult, Needs

# exp(20) is far outside every clip range and far inside float32: a broken log-probability then shows in the metrics instead
# of turning the weights into NaN.
_MAX_LOG_RATIO = 20.0


class PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476, equation 8).

        ratio_t = exp(logprob_t - anchor_t)
        loss    = - sum_t weight_t * min(ratio_t * A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * A_t) / denominator

    The denominator is global: the sum of all policy weights of the update, over every micro-batch. The anchor is what
    `correction` says: the engine's recorded log-probability by default, or the trainer's own before the update, and then each
    token is weighed by how far the two are apart. There is one optimiser step per batch, so the trainer's own before the update
    are those of this very forward, without gradient: no further forward is needed.

    With `tis_cap`, ratio_t is replaced by stop_gradient(min(1, cap / ratio_t)) * ratio_t: the importance weight of a stale
    token is truncated at the cap (Ionides 2008; IMPALA, arXiv 1802.01561, section 4.1), its gradient stays. Only negative
    advantages feel it, because clip_high already bounds the others.
    """

    term = "policy"
    needs = Needs(quantities=frozenset({"logprob", "entropy"}))

    def __init__(self, config: GrpoConfig, correction: Correction | None = None) -> None:
        self._config = config
        self._correction = correction or NoCorrection()

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """The term's share of the update's loss.

        Args:
            quantities: `logprob` [M] float32 with gradient, `entropy` [M] float32.
            micro_batch: `batch.tensors.MicroBatch`.

        Returns:
            A scalar, and the metrics clip_fraction and ratio (to the anchor), approx_kl (to what sampled) and entropy as
            (sum, count) over the policy's tokens, beside those of the correction.
        """
        weights = micro_batch.weights[self.term]
        advantages = micro_batch.advantages
        ours = weights != 0
        corrected = self._correction(quantities["logprob"].detach(), micro_batch.behaviour_logprobs, ours)
        log_ratio = (quantities["logprob"] - corrected.anchor).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        if self._config.tis_cap is not None:
            ratio = ratio * (self._config.tis_cap / ratio.detach()).clamp(max=1.0)
        clipped = ratio.clamp(1.0 - self._config.clip_low, 1.0 + self._config.clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        loss = -(weights * corrected.weights * surrogate).sum() / micro_batch.denominators[self.term]
        with torch.no_grad():
            was_clipped = (clipped * advantages < ratio * advantages) & ours
            # k3 of http://joschu.net/blog/kl-approx.html with samples from the behaviour policy: always positive, unbiased
            moved = (quantities["logprob"] - micro_batch.behaviour_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            kl = (moved.exp() - 1.0 - moved)[ours]
            sums = torch.stack([was_clipped.sum(), ratio[ours].sum(), kl.sum(), quantities["entropy"][ours].sum(), ours.sum()])
            num_clipped, ratio_sum, kl_sum, entropy_sum, count = sums.double().tolist()
        metrics = {
            "clip_fraction": (num_clipped, count),
            "ratio": (ratio_sum, count),
            "approx_kl": (kl_sum, count),
            "entropy": (entropy_sum, count),
            **corrected.metrics,
        }
        return LossResult(loss=loss, metrics=metrics)
