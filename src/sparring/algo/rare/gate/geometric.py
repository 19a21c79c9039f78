"""GMPO: clipped token ratios, combined to the sequence's geometric mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class Geometric(BaseGate, frozen=True, kw_only=True, tag="geometric"):
    """A exp(mean over the sequence of log r'), r' = min(r, high) for A > 0 and max(r, low) for A < 0: GMPO (arXiv
    2507.20673, equation 4). The clip is per token, the ratio per sequence: one outlier neither dominates the ratio nor
    takes the gradient of the other tokens. Use it if GRPO's ratios have outliers. It takes the ratio "token"; the
    defaults of `low` and `high` are the authors' e^-0.4 and e^0.4.

    Clipped tokens contribute no gradient. Meant for one advantage per sequence.
    """

    unit: ClassVar[Unit] = "sequence"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token",)

    low: float = 0.67032
    """Lower clip of the ratio of a token with a negative advantage."""

    high: float = 1.49182
    """Upper clip of the ratio of a token with a positive advantage."""

    def __post_init__(self) -> None:
        if not 0 < self.low < 1 < self.high:
            raise ValueError(f"low must lie between 0 and 1 and high above 1, got {self.low} and {self.high}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        good = tokens.advantages > 0
        ratio = log_ratio.detach().exp()
        stopped = (good & (ratio > self.high)) | ((tokens.advantages < 0) & (ratio < self.low))
        bound = log_ratio.new_full(log_ratio.shape, math.log(self.low)).masked_fill(good, math.log(self.high))
        mean = tokens.mean(bound.where(stopped, log_ratio), self.unit)
        return Gated(surrogate=mean.exp() * tokens.advantages, stopped=stopped)
