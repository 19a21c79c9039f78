"""SAPO: a soft gate instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class Sapo(BaseGate, frozen=True, kw_only=True, tag="sapo"):
    """4 / tau * sigmoid(tau (r - 1)) A, with a separate tau for each sign of A: SAPO (arXiv 2511.20347, equations 5 and
    6). The gradient decays smoothly as the ratio leaves 1, by the factor 4 s (1 - s) with s the sigmoid. Use it if a
    clip would take the gradient of too many tokens, as with mixtures of experts.

    At a ratio of 1 the gradient is that of A log pi and the value is 2 A / tau. The metric clip_fraction counts the
    tokens for which this factor is below one half.
    """

    unit: ClassVar[Unit] = "token"

    tau_positive: float = 1.0
    """Decay rate of the gradient for positive advantages."""

    tau_negative: float = 1.05
    """Decay rate for negative advantages; higher, because lowering a token raises all others of the vocabulary, which
    is unstable."""

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            actual = f"{self.tau_positive} and {self.tau_negative}"
            raise ValueError(f"tau_positive and tau_negative must be above 0, got {actual}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        good = tokens.advantages > 0
        tau = log_ratio.new_full(log_ratio.shape, self.tau_negative).masked_fill(good, self.tau_positive)
        sigmoid = (tau * (log_ratio.exp() - 1.0)).sigmoid()
        stopped = (4.0 * sigmoid * (1.0 - sigmoid)).detach() < 0.5
        return Gated(surrogate=4.0 / tau * sigmoid * tokens.advantages, stopped=stopped)
