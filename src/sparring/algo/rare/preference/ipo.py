"""Identity preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparring.algo.loss.preference.pairs import ReplySums


@dataclass(frozen=True, kw_only=True)
class Ipo:
    """IPO, Azar et al. (arXiv 2310.12036, equation 17). Implements `PairForm`.

        reward = log pi(y|x) - log reference(y|x)
        loss   = (margin - 1 / (2 beta))^2

    beta is the paper's tau. `length_averaged` divides each reply's reward by its number of tokens. The paper does not,
    but common implementations do, because margins of long replies are otherwise far from any fixed target.
    """

    beta: float = 0.1
    length_averaged: bool = False
    name: str = "ipo"
    has_reference: bool = True

    def reward(self, replies: ReplySums) -> torch.Tensor:
        ratio = replies.logprob - replies.reference
        return ratio / replies.length if self.length_averaged else ratio

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        return (margin - 1.0 / (2.0 * self.beta)) ** 2
