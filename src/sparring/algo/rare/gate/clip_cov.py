"""Clip-Cov: no gradient for a few of the tokens that reduce entropy most."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.rare.gate.covariance import STRIDE, covariance
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit
from sparring.annotations import Annotation

if TYPE_CHECKING:
    import torch


class ClipCov(BaseGate, frozen=True, kw_only=True, tag="clip_cov"):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), without gradient for a few tokens, drawn among those with low
    <= cov <= high at which this clip is not active (Clip-Cov, arXiv 2505.22617, equations 10 to 12):

        cov_t = (log pi_t - mean log pi) (A_t - mean A), means over the optimiser step's tokens

    Updates reduce entropy most at likely tokens with a high advantage. Use it against a collapse of entropy. The drawn
    tokens contribute no gradient at any ratio, also at 1. Of a step's N tokens max(1, floor(share N)) are drawn, or all
    candidates if these are fewer. The draw is deterministic: candidates with the smallest frac(i sqrt(3) + 2^13 |log
    behaviour_i|), with i the token's number in the step, from 1. Costs a first pass over the step's tokens.
    """

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token",)
    moves_idle_tokens: ClassVar[bool] = True

    share: float = 0.0002
    """Share of the step's tokens that is drawn."""

    low: float = 1.0
    """Smallest covariance of a candidate."""

    high: float = 5.0
    """Largest covariance of a candidate."""

    clip_low: float = 1.0
    """Lower clip of the other tokens: the ratio is clipped at 1 - clip_low."""

    clip_high: float = 1.0
    """Upper clip of the other tokens: the ratio is clipped at 1 + clip_high."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not self.low < self.high:
            actual = f"{self.share}, {self.low} and {self.high}"
            raise ValueError(f"share must lie above 0 and at most at 1 and low below high, got {actual}")
        if not 0 < self.clip_low <= 1 or not self.clip_high > 0:
            actual = f"{self.clip_low} and {self.clip_high}"
            raise ValueError(f"clip_low must lie above 0 and at most at 1 and clip_high above 0, got {actual}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; drawn tokens and tokens at which the clip is active contribute no gradient."""
        surrogate, clipped = self._clipped_surrogate(log_ratio, tokens)
        chosen = tokens.annotations[Annotation.CHOSEN] > 0
        return Gated(surrogate=surrogate.masked_fill(chosen, 0.0), stopped=chosen | clipped)

    def chosen(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Mark the drawn tokens of the step, which contribute no gradient."""
        cov = covariance(tokens)
        _, clipped = self._clipped_surrogate(log_ratio, tokens)
        candidates = tokens.weighted & (cov >= self.low) & (cov <= self.high) & ~clipped
        number = tokens.weighted.cumsum(0).double()
        draws = (number * STRIDE + tokens.behaviour.double().abs() * 2.0**13).frac()
        count = min(max(1, int(self.share * int(tokens.weighted.sum()))), int(candidates.sum()))
        return tokens.largest(-draws.masked_fill(~candidates, 2.0), count)

    def _clipped_surrogate(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return PPO's surrogate [M], and the tokens at which its clip is active [M]."""
        ratio, advantages = log_ratio.exp(), tokens.advantages
        plain, clipped = ratio * advantages, ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        return plain.minimum(clipped), clipped.detach() < plain.detach()
