"""Direct preference optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule, check_positive

if TYPE_CHECKING:
    import torch

    from sparring.algo.loss.preference.pairs import ReplySums


class Dpo(NamedRule, frozen=True, kw_only=True, tag="dpo"):
    """Direct preference optimisation (arXiv 2305.18290, equation 7).

        r = beta * (log pi(y|x) - log reference(y|x)),    m = r(chosen) - r(rejected)
        loss = -(1 - label_smoothing) * log sigmoid(m) - label_smoothing * log sigmoid(-m)

    The first choice for pairs. With label smoothing (Mitchell 2023) the margins stay finite, as if a share of the
    labels were wrong. Implements `PairForm`.
    """

    has_reference: ClassVar[bool] = True

    beta: float = 0.1
    """Strength of the implicit KL constraint: a larger value keeps the policy nearer to the reference."""
    label_smoothing: float = 0.0
    """Assumed share of swapped labels (conservative DPO)."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be 0 or more and below 0.5, got {self.label_smoothing}")

    def reward(self, replies: ReplySums) -> torch.Tensor:
        return self.beta * (replies.logprob - replies.reference)

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        wrong = self.label_smoothing
        return -(1.0 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
