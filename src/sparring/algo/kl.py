"""Estimates of the divergence from a reference, per token. Torch-free until called.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from sparring.algo.tokens import LARGEST_LOG_RATIO, bounded

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3", "abs"]


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty of coefficient * KL(policy || reference), estimated from the sampled tokens, with d = log(policy / reference)
    (http://joschu.net/blog/kl-approx.html):

        k1   d                   unbiased; for the reward alone: as a loss its gradient is that of log pi, 0 on average
        k2   d^2 / 2             never negative; its gradient is the one of the divergence itself
        k3   exp(-d) - 1 + d     never negative, unbiased; GRPO's (arXiv 2402.03300, equation 4)
        abs  |d|

    In the reward (Ziegler et al., arXiv 1909.08593, equation 2) every token pays for its own d, as it was recorded when sampled,
    before credit. In the loss it has a gradient of its own.
    """

    coefficient: float = 0.0
    """0: no penalty, and no reference is asked."""

    estimator: Estimator = "k3"
    """How it is estimated."""

    placement: Literal["loss", "reward"] = "loss"
    """Where it is subtracted."""

    target: float | None = None
    """The divergence in nats per trajectory that an adaptive coefficient holds; None: the coefficient is fixed."""

    gain: float = 0.1
    """How far an adaptive coefficient moves: by gain times the relative error, which is cut to a fifth, at each update."""

    reference: str = "start"
    """What the reference is. "start": the weights that the stage starts from; "last": the policy's own before each
    update; else the model that `[models.<name>]` describes, with the policy's tokenizer."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ValueError(f"coefficient must be 0 or more, got {self.coefficient}")
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError('estimator must be k2, k3 or abs in the loss: there k1 has no gradient on average, got "k1"')
        if self.target is not None and not (self.target > 0 and self.coefficient > 0):
            got = f"{self.target} and {self.coefficient}"
            raise ValueError(f"target must be above 0 beside a coefficient to begin with, got {got}")
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain must lie above 0 and at most at 1, got {self.gain}")

    @property
    def in_loss(self) -> bool:
        """Whether the loss has the penalty."""
        return self.coefficient > 0 and self.placement == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the reward has it."""
        return self.coefficient > 0 and self.placement == "reward"

    def of(self, difference: float) -> float:
        """The estimate from one token's d."""
        d = max(-LARGEST_LOG_RATIO, min(difference, LARGEST_LOG_RATIO))
        return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[self.estimator]

    def __call__(self, logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The estimate of each token [M], with the gradient of `logprob`."""
        difference = bounded(logprob - reference)
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference.square() / 2
        if self.estimator == "k3":
            return (-difference).exp() - 1 + difference
        return difference.abs()
