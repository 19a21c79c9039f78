"""Simple preference optimisation: without a reference, with rewards per token and a target margin."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule, check_positive

if TYPE_CHECKING:
    import torch

    from sparring.algo.loss.preference.pairs import ReplySums


class SimPo(NamedRule, frozen=True, kw_only=True, tag="simpo"):
    """Simple preference optimisation (arXiv 2405.14734, equation 6), without a reference.

        r = beta * log pi(y|x) / length(y),    loss = -log sigmoid(r(chosen) - r(rejected) - gamma)

    Use it if the reward should match the mean log-probability that generation maximises, and long replies should not
    win by length. Implements `PairForm`.
    """

    has_reference: ClassVar[bool] = False

    beta: float = 2.0
    """Scale of mean log-probabilities."""
    gamma: float = 1.0
    """Target of the margin."""

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        if self.gamma < 0:
            raise ValueError(f"gamma must be 0 or more, got {self.gamma}")

    def reward(self, replies: ReplySums) -> torch.Tensor:
        return self.beta * replies.logprob / replies.length

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import logsigmoid

        return -logsigmoid(margin - self.gamma)
