"""DPPO with total variation: a mask by the change of a token's probability."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class TvMask(BaseGate, frozen=True, kw_only=True, tag="tv_mask"):
    """r A, without gradient for tokens whose |pi - anchor| exceeds `above` and that the update would move further (A >
    0 and r > 1, or A < 0 and r < 1): DPPO with the binary total variation (arXiv 2602.04879, equations 12 and 13). The
    bound is on the difference of probabilities, not on their ratio: a rare token may become many times likelier, a
    likely one changes by little. Use it instead of PPO's clip with large vocabularies. Its authors compare with the
    sampling policy (anchor = "behaviour"); their larger runs also bound r by 5."""

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token",)

    above: float = 0.15
    """Difference of probabilities above which a token is masked."""

    def __post_init__(self) -> None:
        if not 0 < self.above < 1:
            raise ValueError(f"above must lie between 0 and 1, got {self.above}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        moved = tokens.logprob.detach().exp() - tokens.anchor.exp()
        stopped = (moved.abs() > self.above) & (moved * tokens.advantages > 0)
        return Gated(surrogate=(log_ratio.exp() * tokens.advantages).masked_fill(stopped, 0.0), stopped=stopped)
