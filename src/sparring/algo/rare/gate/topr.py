"""TOPR: no ratio for positive advantages, a ratio of at most 1 for negative ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class ToprGate(BaseGate, frozen=True, kw_only=True, tag="topr"):
    """A log pi for A >= 0, and stop_gradient(clip(r, 0, bound)) A log pi for A < 0: tapered off-policy REINFORCE (TOPR,
    arXiv 2503.14286, equations 7 and 8). Trajectories with A >= 0 are trained as in supervised learning, however
    unlikely they have become; those with A < 0 fade out as they become rare. Use it on stale or foreign data, with the
    ratio "product" of the whole trajectory."""

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token", "mean", "product")

    bound: float = 1.0
    """Largest weight of a token with a negative advantage."""

    def __post_init__(self) -> None:
        if not self.bound >= 1:
            raise ValueError(f"bound must be at least 1, the weight at equal probabilities, got {self.bound}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; a token with a clipped weight is `stopped`, but keeps its gradient."""
        ratio, bad = log_ratio.detach().exp(), tokens.advantages < 0
        weight = ratio.clamp(max=self.bound).masked_fill(~bad, 1.0)
        return Gated(surrogate=weight * tokens.advantages * tokens.logprob, stopped=bad & (ratio > self.bound))
