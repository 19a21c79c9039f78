"""VESPO: a smooth importance weight for whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, RatioKind, Unit

if TYPE_CHECKING:
    import torch


class Vespo(BaseGate, frozen=True, kw_only=True, tag="vespo"):
    """stop_gradient(w^k exp(lambda (1 - w))) A log pi, with w the ratio of the whole sequence and separate k and lambda
    for each sign of A: VESPO (arXiv 2602.10693, equation 20). The weight is 1 at w = 1, largest at w = k / lambda and 0
    in both tails; there is no normalisation by length. Use it for data that is many updates stale. It takes the ratio
    "product".

    The metric clip_fraction counts the tokens with a weight below one half.
    """

    unit: ClassVar[Unit] = "token"
    takes: ClassVar[tuple[RatioKind, ...]] = ("product",)

    k_positive: float = 2.0
    """Exponent k for positive advantages."""

    lambda_positive: float = 3.0
    """Rate lambda for positive advantages."""

    k_negative: float = 3.0
    """Exponent k for negative advantages."""

    lambda_negative: float = 2.0
    """Rate lambda for negative advantages."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        moved, good = log_ratio.detach(), tokens.advantages > 0
        power = moved.new_full(moved.shape, self.k_negative).masked_fill(good, self.k_positive)
        rate = moved.new_full(moved.shape, self.lambda_negative).masked_fill(good, self.lambda_positive)
        weight = (power * moved + rate * (1.0 - moved.exp())).exp()
        return Gated(surrogate=weight * tokens.advantages * tokens.logprob, stopped=weight < 0.5)
