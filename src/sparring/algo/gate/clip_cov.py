"""No gradient for a few of the tokens that cost entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from sparring.algo.gate.covariance import STRIDE, covariance
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class ClipCov(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="clip_cov", tag_field="name"):
    """r A, without gradient for a share of the step's tokens, drawn among those with low <= cov <= high (Clip-Cov, arXiv
    2505.22617, equations 10 to 12):

        cov_t = (log pi_t - mean log pi) (A_t - mean A), means over the optimiser step's tokens

    Entropy falls where likely tokens are good, and these tokens are where it falls most. Use it where entropy collapses. The
    chosen ones are stopped at any ratio, also at 1. The draw is a function of the recorded log-probabilities and of the
    tokens' order in the batch: the floor(share N) smallest of frac(i sqrt(3) + 2^13 |log behaviour_i|), i from 1. Costs a
    first pass over the step's tokens. Its authors' code also clips the ratios of the others, as PPO does.
    """

    unit: ClassVar[Unit] = "token"

    share: float = 0.0002
    """How many of all tokens are chosen."""

    low: float = 1.0
    """The least covariance of a token that may be chosen."""

    high: float = 5.0
    """The largest."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not self.low < self.high:
            got = f"{self.share}, {self.low} and {self.high}"
            raise ValueError(f"share must lie above 0 and at most at 1 and low below high, got {got}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """The surrogate [M]; stopped are the chosen tokens."""
        stopped = tokens.annotations["chosen"] > 0
        return Gated(surrogate=(log_ratio.exp() * tokens.advantages).masked_fill(stopped, 0.0), stopped=stopped)

    def chosen(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> torch.Tensor:
        """Which of the step's tokens have no gradient."""
        cov = covariance(tokens)
        candidates = tokens.ours & (cov >= self.low) & (cov <= self.high)
        number = tokens.ours.cumsum(0).double()
        drawn = (number * STRIDE + tokens.behaviour.double().abs() * 2.0**13).frac()
        count = min(int(self.share * int(tokens.ours.sum())), int(candidates.sum()))
        return tokens.largest(-drawn.masked_fill(~candidates, 2.0), count)
