"""Identity preference optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule, check_positive

if TYPE_CHECKING:
    import torch

    from sparring.algo.loss.preference.pairs import ReplySums


class Ipo(NamedRule, frozen=True, kw_only=True, tag="ipo"):
    """Identity preference optimisation (arXiv 2310.12036, equation 17).

        r = log pi(y|x) - log reference(y|x),    loss = (r(chosen) - r(rejected) - 1 / (2 * beta))^2

    Use it if preferences are nearly deterministic: the margin has a target, while DPO's grows without bound.
    Implements `PairForm`.
    """

    has_reference: ClassVar[bool] = True

    beta: float = 0.1
    """The paper's tau; the target of the margin is 1 / (2 beta)."""
    length_averaged: bool = False
    """Average log-ratios over tokens, as common implementations do. False: sum them, as in the paper."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)

    def reward(self, replies: ReplySums) -> torch.Tensor:
        ratio = replies.logprob - replies.reference
        return ratio / replies.length if self.length_averaged else ratio

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        return (margin - 1.0 / (2.0 * self.beta)) ** 2
