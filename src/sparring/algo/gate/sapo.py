"""A soft gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sparring.algo.facts import Facts
from sparring.algo.gate.base import BaseGate
from sparring.algo.tokens import Gated, PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class Sapo(BaseGate, frozen=True, kw_only=True, tag="sapo"):
    """4 / tau * sigmoid(tau (r - 1)) A, with a tau of its own for either sign of A: SAPO (arXiv 2511.20347, equations 5
    and 6). The gradient fades as the ratio leaves 1, by 4 s (1 - s) with s the sigmoid, instead of ending at a bound.
    Use it where clipping loses too many tokens, as with mixtures of experts.

    At a ratio of 1 the gradient is that of A log pi and the value is 2 A / tau. Stopped are the tokens whose gradient
    is faded to under one half.
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2511.20347, equations 5 and 6",
        defaults={"tau_positive": "the paper", "tau_negative": "the paper"},
        differences=(),
    )

    unit: ClassVar[Unit] = "token"

    tau_positive: float = 1.0
    """Rate at which the gradient of good tokens fades."""

    tau_negative: float = 1.05
    """Rate for bad tokens; higher, because they make the vocabulary's other tokens likelier, which is unstable."""

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            got = f"{self.tau_positive} and {self.tau_negative}"
            raise ValueError(f"tau_positive and tau_negative must be above 0, got {got}")

    def __call__(self, log_ratio: torch.Tensor, tokens: PolicyTokens) -> Gated:
        """Compute the surrogate [M]."""
        good = tokens.advantages > 0
        tau = log_ratio.new_full(log_ratio.shape, self.tau_negative).masked_fill(good, self.tau_positive)
        sigmoid = (tau * (log_ratio.exp() - 1.0)).sigmoid()
        faded = (4.0 * sigmoid * (1.0 - sigmoid)).detach() < 0.5
        return Gated(surrogate=4.0 / tau * sigmoid * tokens.advantages, stopped=faded)
