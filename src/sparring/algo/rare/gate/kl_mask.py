"""DPPO with binary KL: a mask by the divergence of a token's probability."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class KlMask(BaseGate, frozen=True, kw_only=True, tag="kl_mask"):
    """r A, without gradient for tokens whose D exceeds `above` and that the update would move further (A > 0 and r > 1,
    or A < 0 and r < 1): DPPO with the binary KL divergence (arXiv 2602.04879, equations 12 and 14):

        D = m log(m / p) + (1 - m) log((1 - m) / (1 - p))      p: the token's probability, m: the anchor's

    Like `tv_mask`, but stricter with probabilities near 0 and 1. Its authors compare with the sampling policy (anchor =
    "behaviour").
    """

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("token",)

    above: float = 0.05
    """Divergence above which a token is masked."""

    def __post_init__(self) -> None:
        if not self.above > 0:
            raise ValueError(f"above must be above 0, got {self.above}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        current, anchor = tokens.logprob.detach().clamp(max=0.0), tokens.anchor.clamp(max=0.0)
        other_current, other_anchor = -current.expm1(), -anchor.expm1()
        of_others = other_anchor.xlogy(other_anchor) - other_anchor.xlogy(other_current)  # 0 log 0 is 0
        distance = anchor.exp() * (anchor - current) + of_others
        stopped = (distance > self.above) & (log_ratio.detach() * tokens.advantages > 0)
        return Gated(surrogate=(log_ratio.exp() * tokens.advantages).masked_fill(stopped, 0.0), stopped=stopped)
