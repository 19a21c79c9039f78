"""Value term of a critic, which predicts the reward to go before each token.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.annotations import Annotation
from sparring.protocols import LossResult, Needs


class ValueLoss:
    """Half the squared error of a critic, clipped as in PPO's code.

        loss = sum_t weight_t * 1/2 max((V_t - R_t)^2, (V_t' - R_t)^2) / denominator
        V_t' = V_t(old) + clamp(V_t - V_t(old), -clip, clip)

    Schulman et al. (arXiv 1707.06347, equation 9) have the squared error, Engstrom et al. (arXiv 2005.12729, section 3)
    its clipped form. V_t is the value of the context before token t. The target R_t is the annotation `return`, which
    the credit rule wrote; V_t(old), the critic's value before the update, is the annotation `value`. Implements `Loss`.

    Args:
        clip: maximum change from V_t(old) that lowers the loss, in units of reward; 0: no bound.
    """

    term = "value"
    needs = Needs(quantities=frozenset({"value"}))

    def __init__(self, *, clip: float = 0.2) -> None:
        self.clip = clip

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss: a scalar from `value` [M] float32 with gradient.

        Metrics, as (sum, count) over weighted tokens: clip_fraction (share of tokens with the clipped error) and the
        means value, return, return_square, error (R - V) and error_square, from which an explained variance is
        computed.
        """
        weights, values = micro_batch.weights[self.term], quantities["value"]
        old = micro_batch.annotations[Annotation.VALUE].to(values.dtype)
        target = micro_batch.annotations[Annotation.RETURN].to(values.dtype)
        error = (values - target) ** 2
        stopped = torch.zeros_like(weights, dtype=torch.bool)
        if self.clip:
            clipped_error = (old + (values - old).clamp(-self.clip, self.clip) - target) ** 2
            stopped = clipped_error > error
            error = torch.where(stopped, clipped_error, error)
        loss = 0.5 * (weights * error).sum() / micro_batch.denominators[self.term]
        return LossResult(loss=loss, metrics=_metrics(values, target, stopped, weights != 0))


@torch.no_grad()
def _metrics(
    values: torch.Tensor, target: torch.Tensor, stopped: torch.Tensor, weighted: torch.Tensor
) -> dict[str, tuple[float, float]]:
    predicted, earned = values.detach()[weighted].double(), target[weighted].double()
    error, count = earned - predicted, float(weighted.sum())
    sums = {"clip_fraction": stopped[weighted].double(), "value": predicted, "return": earned}
    sums |= {"return_square": earned**2, "error": error, "error_square": error**2}
    return {name: (column.sum().item(), count) for name, column in sums.items()}
