"""PPO's clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class Clip(BaseGate, frozen=True, kw_only=True, tag="clip"):
    """min(r A, clip(r, 1 - low, 1 + high) A): PPO (arXiv 1707.06347, equation 7), with a separate upper bound that
    leaves room to explore (clip-higher, DAPO, arXiv 2503.14476, equation 8)."""

    unit: ClassVar[Unit] = "token"

    low: float = 0.2
    """Lower clip: the ratio is clipped at 1 - low."""

    high: float = 0.28
    """Upper clip: the ratio is clipped at 1 + high."""

    def __post_init__(self) -> None:
        if not 0 < self.low < 1:
            raise ValueError(f"low must lie between 0 and 1, got {self.low}")
        if self.high < self.low:
            raise ValueError(f"high must not be below low, got {self.high} and {self.low}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; tokens at which the clip is active contribute no gradient."""
        ratio, advantages = log_ratio.exp(), tokens.advantages
        plain, clipped = ratio * advantages, ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages
        return Gated(surrogate=plain.minimum(clipped), stopped=clipped.detach() < plain.detach())
