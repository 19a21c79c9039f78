"""Ratios: the change in probability of a token, a turn or a sequence. Torch-free until called.

A ratio computes the logarithm of each token's ratio [M], with gradient; tokens of one `unit` share a ratio. It is
exactly 0 where logprob and anchor are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.base import NamedRule
from sparring.algo.tokens import PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class TokenRatio(NamedRule, frozen=True, kw_only=True, tag="token"):
    """r_t = pi(y_t) / anchor(y_t): PPO (arXiv 1707.06347, section 3)."""

    unit: ClassVar[Unit] = "token"
    kind: ClassVar[RatioKind] = "token"

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        return tokens.log_ratio


class SequenceRatio(NamedRule, frozen=True, kw_only=True, tag="sequence"):
    """s_i = exp(mean over the sequence of log r_t), the same for all its tokens: GSPO (arXiv 2507.18071, equation 7).

    With `per_token` the value is the sequence's and the gradient each token's own: stop_gradient(s_i) * pi /
    stop_gradient(pi) (GSPO-token, equation 14). Advantages that differ within a sequence need it.
    """

    unit: ClassVar[Unit] = "sequence"
    kind: ClassVar[RatioKind] = "mean"

    per_token: bool = False
    """Give each token a gradient of its own."""

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        return _mean_ratio(tokens, self.unit, per_token=self.per_token)


class TurnRatio(NamedRule, frozen=True, kw_only=True, tag="turn"):
    """exp(mean over the turn of log r_t), the same for all tokens of one turn: GSPO's sequence ratio (arXiv 2507.18071,
    equation 7), applied to one turn of an agent."""

    unit: ClassVar[Unit] = "turn"
    kind: ClassVar[RatioKind] = "mean"

    per_token: bool = False
    """Give each token a gradient of its own, as for the ratio `sequence`."""

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        return _mean_ratio(tokens, self.unit, per_token=self.per_token)


class ProductRatio(NamedRule, frozen=True, kw_only=True, tag="product"):
    """exp(sum over the sequence of log r_t), the same for all its tokens: the importance weight of a whole trajectory
    (Precup, Sutton and Singh 2000). Unbiased, but its variance grows with the length: use it with gates that bound it,
    such as `topr` and `vespo`."""

    unit: ClassVar[Unit] = "sequence"
    kind: ClassVar[RatioKind] = "product"

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        return tokens.sum(tokens.log_ratio, self.unit)


def _mean_ratio(tokens: PolicyTokens, unit: Unit, *, per_token: bool) -> torch.Tensor:
    if per_token:
        return tokens.mean(tokens.log_ratio.detach(), unit) + (tokens.logprob - tokens.logprob.detach())
    return tokens.mean(tokens.log_ratio, unit)
