"""Dual-clip PPO: PPO's clip with a lower bound for negative advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class DualClip(BaseGate, frozen=True, kw_only=True, tag="dual_clip"):
    """min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never below bound A: dual-clip PPO (arXiv 1912.09729,
    equation 5). Without the bound, a token with A < 0 that became much likelier has a gradient proportional to its
    ratio. Use it if stale data or an inexact engine gives large ratios. `bound` alone, with a wide `high`, is the
    two-sided clip of INTELLECT-2 (arXiv 2505.07291)."""

    unit: ClassVar[Unit] = "token"

    low: float = 0.2
    """Lower clip: the ratio is clipped at 1 - low."""

    high: float = 0.2
    """Upper clip: the ratio is clipped at 1 + high."""

    bound: float = 3.0
    """Largest ratio at which a token with a negative advantage still has a gradient."""

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 or self.high <= 0:
            raise ValueError(f"low must lie between 0 and 1 and high above 0, got {self.low} and {self.high}")
        if self.bound <= 1 + self.high:
            raise ValueError(f"bound must be above 1 + high, got {self.bound} and {self.high}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; tokens at which a bound is active contribute no gradient."""
        ratio, advantages = log_ratio.exp(), tokens.advantages
        plain, clipped = ratio * advantages, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages
        stopped = (clipped < plain) | ((ratio > self.bound) & (advantages < 0))
        floor = (self.bound * advantages).masked_fill(advantages >= 0, -float("inf"))
        return Gated(surrogate=plain.minimum(clipped).maximum(floor), stopped=stopped.detach())
