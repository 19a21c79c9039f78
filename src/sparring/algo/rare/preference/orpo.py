"""Odds ratio preference optimisation: without a reference, in addition to the negative log-likelihood of the chosen
reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule, check_positive

if TYPE_CHECKING:
    import torch

    from sparring.algo.loss.preference.pairs import ReplySums

MOST_LIKELY = -1e-6
"""Upper bound on a reply's mean log-probability: at 0 the odds would be infinite."""


class Orpo(NamedRule, frozen=True, kw_only=True, tag="orpo"):
    """Odds ratio preference optimisation (arXiv 2403.07691, equations 6 and 7), without a reference, added to imitation
    of the chosen reply.

        r = log odds of exp(log pi(y|x) / length(y))
        loss = imitation - strength * log sigmoid(r(chosen) - r(rejected))

    Use it instead of supervised fine-tuning: one stage from a base model. Implements `PairForm`.
    """

    has_reference: ClassVar[bool] = False

    strength: float = 0.1
    """Weight of the preference part; the paper's lambda."""

    def __post_init__(self) -> None:
        check_positive(strength=self.strength)

    def reward(self, replies: ReplySums) -> torch.Tensor:
        mean = (replies.logprob / replies.length).clamp(max=MOST_LIKELY)
        return mean - (-mean.expm1()).log()

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        return -self.strength * logsigmoid(margin)
