"""PPO's clip with a floor under bad tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.facts import Facts
from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class DualClip(BaseGate, frozen=True, kw_only=True, tag="dual_clip"):
    """min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never below bound A: dual-clip PPO (arXiv 1912.09729,
    equation 5). A bad token that became much likelier otherwise pushes in proportion to its ratio. Use it where stale
    data or another engine gives large ratios. `bound` alone, with a wide `high`, is the two-sided clip of INTELLECT-2
    (arXiv 2505.07291).
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 1912.09729, equation 5",
        defaults={
            "low": "the paper",
            "high": "the paper",
            "bound": "the paper; verl's and INTELLECT-2's are 3 and 4",
        },
        differences=(),
    )

    unit: ClassVar[Unit] = "token"

    low: float = 0.2
    """The ratio is clipped below at 1 - low."""

    high: float = 0.2
    """The ratio is clipped above at 1 + high."""

    bound: float = 3.0
    """The largest ratio at which a token of negative advantage still has a gradient."""

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 or self.high <= 0:
            raise ValueError(f"low must lie between 0 and 1 and high above 0, got {self.low} and {self.high}")
        if self.bound <= 1 + self.high:
            raise ValueError(f"bound must be above 1 + high, got {self.bound} and {self.high}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; stopped are the tokens that a bound decides."""
        ratio, advantages = log_ratio.exp(), tokens.advantages
        plain, clipped = ratio * advantages, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages
        stopped = (clipped < plain) | ((ratio > self.bound) & (advantages < 0))
        floor = (self.bound * advantages).masked_fill(advantages >= 0, -float("inf"))
        return Gated(surrogate=plain.minimum(clipped).maximum(floor), stopped=stopped.detach())
