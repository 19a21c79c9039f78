"""M2PO: a mask that bounds the second moment of log ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit
from sparring.annotations import Annotation

if TYPE_CHECKING:
    import torch


class M2po(BaseGate, frozen=True, kw_only=True, tag="m2po"):
    """r A, with a mask on outliers among the tokens that the update would move further from the anchor (A > 0 and r >
    1, or A < 0 and r < 1): M2PO (arXiv 2510.01161, algorithm 1 and equations 4 and 5).

    Masked are those with the largest (log r)^2 in the optimiser step: the smallest number that brings the mean of (log
    r)^2 over the others down to `bound`. Masked tokens contribute no gradient. Tokens that move back towards the anchor
    are never masked and do not enter the mean. So only outliers are masked, however stale the data is. Use it with a
    large `max_lag`. Costs a first pass over the step's tokens. This is the paper's mask; its authors' code instead
    turns the bound into a clip range, never narrower than given constants.
    """

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token",)

    bound: float = 0.04
    """Largest mean of (log r)^2 over the unmasked tokens that move away."""

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound must be above 0, got {self.bound}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        stopped = tokens.annotations[Annotation.CHOSEN] > 0
        return Gated(surrogate=(log_ratio.exp() * tokens.advantages).masked_fill(stopped, 0.0), stopped=stopped)

    def chosen(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Mark the masked tokens of the step."""
        moved = log_ratio.detach().double()
        moving_away = tokens.weighted & (moved * tokens.advantages > 0)
        squares = moved.square().masked_fill(~moving_away, -1.0)
        ascending = squares[moving_away].sort().values
        means = ascending.cumsum(0) / ascending.new_ones(len(ascending)).cumsum(0)
        return tokens.largest(squares, int((means > self.bound).sum()))
