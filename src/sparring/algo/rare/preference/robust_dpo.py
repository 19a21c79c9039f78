"""Robust DPO: its expectation does not change under labels that are swapped at a known rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import ReplySums


@dataclass(frozen=True, kw_only=True)
class RobustDpo:
    """Robust DPO, Ray Chowdhury et al. (arXiv 2403.00409). Implements `PairForm`.

        reward = beta * (log pi(y|x) - log reference(y|x))
        loss   = (-(1 - e) * log sigmoid(margin) + e * log sigmoid(-margin)) / (1 - 2 e)

    e is the rate of swapped labels, below one half. Over labels with this rate, the expected loss is DPO's loss on
    correct labels. The loss can be negative.
    """

    beta: float = 0.1
    flip_rate: float = 0.1
    name: str = "robust_dpo"
    has_reference: bool = True

    def reward(self, replies: ReplySums) -> torch.Tensor:
        return self.beta * (replies.logprob - replies.reference)

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        wrong = self.flip_rate
        return (-(1.0 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1.0 - 2.0 * wrong)
