"""CISPO: a clipped importance weight on the log-probability."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class Cispo(BaseGate, frozen=True, kw_only=True, tag="cispo"):
    """stop_gradient(clip(r, 1 - low, 1 + high)) A log pi: CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). The
    weight is clipped but no token loses its gradient, so rare but important tokens keep contributing. Its authors use
    no lower bound (low = 1)."""

    unit: ClassVar[Unit] = "token"

    low: float = 1.0
    """Lower clip: the weight is at least 1 - low."""

    high: float = 0.28
    """Upper clip: the weight is at most 1 + high."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 or self.high <= 0:
            raise ValueError(f"low must lie above 0 and at most at 1, and high above 0, got {self.low} and {self.high}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; a token with a clipped weight is `stopped`, but keeps its gradient."""
        ratio = log_ratio.detach().exp()
        weight = ratio.clamp(1.0 - self.low, 1.0 + self.high)
        return Gated(surrogate=weight * tokens.advantages * tokens.logprob, stopped=weight != ratio)
