"""Odds ratio preference optimisation: without a reference, in addition to the negative log-likelihood of the chosen
reply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import ReplySums

MOST_LIKELY = -1e-6
"""Upper bound on a reply's mean log-probability: at 0 the odds would be infinite."""


@dataclass(frozen=True, kw_only=True)
class Orpo:
    """ORPO, Hong et al. (arXiv 2403.07691, equations 4, 6 and 7). Implements `PairForm`.

        reward = log odds = m - log(1 - exp(m)),    m = log pi(y|x) / length
        loss   = -strength * log sigmoid(margin)

    Equation 6 adds this loss to the negative log-likelihood of the chosen reply, which is the imitate term on the same
    rows. strength is the paper's lambda.
    """

    strength: float = 0.1
    name: str = "orpo"
    has_reference: bool = False

    def reward(self, replies: ReplySums) -> torch.Tensor:
        mean = (replies.logprob / replies.length).clamp(max=MOST_LIKELY)
        return mean - torch.log(-torch.expm1(mean))

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        return -self.strength * logsigmoid(margin)
