"""Good tokens plain, bad ones with a ratio of at most 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.facts import Facts
from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class ToprGate(BaseGate, frozen=True, kw_only=True, tag="topr"):
    """A log pi for A >= 0, and stop_gradient(clip(r, 0, bound)) A log pi for A < 0: tapered off-policy REINFORCE (TOPR,
    arXiv 2503.14286, equations 7 and 8). Good trajectories teach as in supervised learning however unlikely they have
    become; bad ones are left alone once they are rare. Use it on stale or foreign data, with the ratio "product", a
    trajectory's own.
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2503.14286, equations 7 and 8",
        defaults={"bound": "the paper: [0, 1]"},
        differences=(),
    )

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token", "mean", "product")

    bound: float = 1.0
    """The largest weight of a token of negative advantage."""

    def __post_init__(self) -> None:
        if not self.bound >= 1:
            raise ValueError(f"bound must be at least 1, the weight at equal probabilities, got {self.bound}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; stopped are bad tokens whose weight is clipped."""
        ratio, bad = log_ratio.detach().exp(), tokens.advantages < 0
        weight = ratio.clamp(max=self.bound).masked_fill(~bad, 1.0)
        return Gated(surrogate=weight * tokens.advantages * tokens.logprob, stopped=bad & (ratio > self.bound))
