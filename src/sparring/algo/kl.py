"""Per-token estimates of the KL divergence from a reference model. Torch-free until called.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from sparring.algo.tokens import bounded

if TYPE_CHECKING:
    import torch

Estimator = Literal["k2", "k3", "abs", "full"]


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KL penalty in the loss, coefficient * KL(policy || reference), estimated from the sampled tokens with d =
    log(policy / reference) (http://joschu.net/blog/kl-approx.html), or computed exactly:

        k2    d^2 / 2             never negative; unbiased gradient
        k3    exp(-d) - 1 + d     never negative, unbiased; GRPO's (arXiv 2402.03300, equation 4)
        abs   |d|
        full  sum_v policy(v) log(policy(v) / reference(v))     over the vocabulary, at each sampled token

    The unbiased estimate d itself, k1, is for `kl_reward` alone: as a loss its expected gradient is 0. The exact
    divergence, full, has no sampling noise. It costs one forward of the reference for each forward of the policy, and
    two more products with the heads. If sampling was truncated or biased (top-k, top-p, logit bias), every estimator
    uses the distribution that was sampled from, and the reference renormalised over the same ids. Use it to keep a
    policy near a model whose other abilities matter.
    """

    coefficient: float = 0.0
    """Weight of the penalty. 0: no penalty, and no reference model is computed."""

    estimator: Estimator = "k3"
    """Estimator of the divergence."""

    target: float | None = None
    """Divergence in nats per trajectory that an adaptive coefficient aims at; None: the coefficient is fixed."""

    gain: float = 0.1
    """Step of an adaptive coefficient at each update: gain times the relative error, clipped to 0.2."""

    reference: str = "start"
    """Reference model, also for `kl_reward`. "start": the weights that the stage starts from; "last": the policy before
    each update; "average": a moving average of the policy; any other value: the name of a `[models.<name>]` with the
    policy's tokenizer."""

    decay: float = 0.99
    """Decay of the reference "average", which begins as the start: after every update average = decay * average + (1 -
    decay) * policy (WARP, arXiv 2406.16768, section 3.1)."""

    def __post_init__(self) -> None:
        if not self.coefficient >= 0:
            raise ValueError(f"coefficient must be 0 or more, got {self.coefficient}")
        if not 0 < self.decay < 1:
            raise ValueError(
                f'decay must lie between 0 and 1, got {self.decay}; its ends are the references "last" and "start"'
            )
        check_target(self.coefficient, self.target, self.gain)

    def __call__(self, logprob: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Estimate the divergence at each token [M], with the gradient of `logprob`; not for "full", which needs
        logits."""
        difference = bounded(logprob - reference)
        if self.estimator == "k2":
            return difference.square() / 2
        if self.estimator == "k3":
            return (-difference).exp() - 1 + difference
        return difference.abs()


def check_target(coefficient: float, target: float | None, gain: float) -> None:
    """Refuse settings of an adaptive coefficient that are out of range (`ValueError`)."""
    if target is not None and not (target > 0 and coefficient > 0):
        actual = f"{target} and {coefficient}"
        raise ValueError(f"target must be above 0 with a coefficient above 0 to start from, got {actual}")
    if not 0 < gain <= 1:
        raise ValueError(f"gain must lie above 0 and at most at 1, got {gain}")
