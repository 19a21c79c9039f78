"""Covariance of a token's log-probability and its advantage: the entropy that its step costs. Torch-free until
called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparring.algo.tokens import PolicyTokens

if TYPE_CHECKING:
    import torch

STRIDE = 3.0**0.5
"""Multiples of it are spread evenly between the integers (Weyl 1916)."""


def covariance(tokens: PolicyTokens) -> torch.Tensor:
    """Compute each token's part of the covariance over all tokens given [M], without gradient (arXiv 2505.22617,
    equation 10)."""
    logprob, advantages = tokens.logprob.detach(), tokens.advantages
    return (logprob - tokens.average(logprob)) * (advantages - tokens.average(advantages))
