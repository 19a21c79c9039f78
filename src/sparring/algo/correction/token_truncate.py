"""Truncated importance sampling per token (TIS)."""

from __future__ import annotations

import torch

from sparring.protocols import Corrected


class TokenTruncate:
    """Implements `Correction` after Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training".

        weight_t = stop_gradient(min(exp(old_t - behaviour_t), cap))
        loss     = - sum_t weight_t * min(ratio_t * A_t, clip(ratio_t) * A_t) / denominator,    ratio_t = exp(logprob_t - old_t)

    behaviour_t is the engine's log-probability of the token that it sampled, old_t the trainer's of the same token before the
    update. Their quotient moves the expectation from the engine's distribution to the trainer's; the cap bounds its variance and
    leaves a bias from the tokens beyond it. Where the two are equal the weight is exactly 1 and the loss has the bits of the
    uncorrected one.

    Args:
        cap: largest weight, at least 1.
    """

    name = "token_truncate"

    def __init__(self, cap: float) -> None:
        self._cap = cap

    def __call__(self, old: torch.Tensor, behaviour: torch.Tensor, ours: torch.Tensor) -> Corrected:
        """The trainer's own log-probabilities [M] as anchor; metrics correction_weight (mean) and
        correction_truncated (share of the tokens beyond the cap)."""
        whole = (old.detach() - behaviour).exp()
        weights = whole.clamp(max=self._cap)
        sums = torch.stack([(whole[ours] > self._cap).sum(), weights[ours].double().sum(), ours.sum()])
        truncated, total, count = sums.double().tolist()
        metrics = {"correction_weight": (total, count), "correction_truncated": (truncated, count)}
        return Corrected(anchor=old.detach(), weights=weights, metrics=metrics)
