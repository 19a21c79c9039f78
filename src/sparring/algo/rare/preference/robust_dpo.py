"""Robust DPO: a loss whose expectation stays the same if labels are swapped at a known rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule, check_positive

if TYPE_CHECKING:
    import torch

    from sparring.algo.loss.preference.pairs import ReplySums


class RobustDpo(NamedRule, frozen=True, kw_only=True, tag="robust_dpo"):
    """DPO, unbiased under labels that are swapped at a known rate (arXiv 2403.00409).

        loss = (-(1 - flip_rate) * log sigmoid(m) + flip_rate * log sigmoid(-m)) / (1 - 2 * flip_rate),    m as in dpo

    Use it if the error rate of the labels is known, such as from judges that were asked twice. Implements `PairForm`.
    """

    has_reference: ClassVar[bool] = True

    beta: float = 0.1
    """Strength of the implicit KL constraint: a larger value keeps the policy nearer to the reference."""
    flip_rate: float = 0.1
    """Share of swapped labels in the data."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        if not 0 <= self.flip_rate < 0.5:
            raise ValueError(f"flip_rate must be 0 or more and below 0.5, got {self.flip_rate}")

    def reward(self, replies: ReplySums) -> torch.Tensor:
        return self.beta * (replies.logprob - replies.reference)

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        wrong = self.flip_rate
        return (-(1.0 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1.0 - 2.0 * wrong)
