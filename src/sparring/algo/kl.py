"""Estimates of the divergence from a reference, per token. Torch-free until called.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from sparring.algo.tokens import bounded

if TYPE_CHECKING:
    import torch

Estimator = Literal["k2", "k3", "abs"]


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty of coefficient * KL(policy || reference) in the loss, estimated from the sampled tokens, with d = log(policy /
    reference) (http://joschu.net/blog/kl-approx.html):

        k2   d^2 / 2             never negative; its gradient is the one of the divergence itself
        k3   exp(-d) - 1 + d     never negative, unbiased; GRPO's (arXiv 2402.03300, equation 4)
        abs  |d|

    The unbiased d itself is not among them: its gradient is that of the log-probability, which is 0 on average.
    """

    coefficient: float = 0.0
    """0: no penalty, and no reference is asked."""

    estimator: Estimator = "k3"
    """How it is estimated."""

    reference: str = "start"
    """What the reference is: "start", the weights that the stage starts from."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ValueError(f"coefficient must be 0 or more, got {self.coefficient}")
        if self.reference != "start":
            raise ValueError(f'reference must be "start", got {self.reference!r}')

    def __call__(self, logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The estimate of each token [M], with the gradient of `logprob`."""
        difference = bounded(logprob - reference)
        if self.estimator == "k2":
            return difference.square() / 2
        if self.estimator == "k3":
            return (-difference).exp() - 1 + difference
        return difference.abs()
