"""DPO whose expectation does not change when labels are turned round at a known rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import ReplySums


@dataclass(frozen=True, kw_only=True)
class RobustDpo:
    """Implements `PairForm` after Ray Chowdhury et al. (arXiv 2403.00409).

        reward = beta * (log pi(y|x) - log reference(y|x))
        loss   = (-(1 - e) * log sigmoid(margin) + e * log sigmoid(-margin)) / (1 - 2 e)

    e is the rate, below one half. Over labels that are wrong at this rate the mean is DPO's loss on the right ones.
    """

    beta: float = 0.1
    flip_rate: float = 0.1
    name: str = "robust_dpo"
    has_reference: bool = True

    def reward(self, replies: ReplySums) -> torch.Tensor:
        """Return implicit rewards, in nats times beta."""
        return self.beta * (replies.logprob - replies.reference)

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        """Compute the loss [P] of margins [P]; may be negative."""
        wrong = self.flip_rate
        return (-(1.0 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1.0 - 2.0 * wrong)
