"""No gate: the plain importance-sampled objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class NoGate(BaseGate, frozen=True, kw_only=True, tag="none"):
    """r A: importance sampling without a bound. At a ratio of 1, when every batch is trained once with the weights that
    sampled it, this is REINFORCE (Williams 1992)."""

    unit: ClassVar[Unit] = "token"

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]; no token counts as clipped."""
        return Gated(surrogate=log_ratio.exp() * tokens.advantages, stopped=tokens.weighted & False)
