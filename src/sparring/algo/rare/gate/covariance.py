"""Covariance of a token's log-probability and advantage, which predicts the entropy that an update costs. Torch-free
until called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparring.algo.tokens import PolicyTokens

if TYPE_CHECKING:
    import torch

STRIDE = 3.0**0.5
"""Step of a low-discrepancy sequence: the fractional parts of its multiples are evenly spread (Weyl 1916)."""


def covariance(tokens: PolicyTokens) -> torch.Tensor:
    """Compute each token's summand [M] of the covariance over all given tokens, without gradient (arXiv 2505.22617,
    equation 10)."""
    logprob, advantages = tokens.logprob.detach(), tokens.advantages
    return (logprob - tokens.average(logprob)) * (advantages - tokens.average(advantages))
