"""Gradients and weights that are not finite: what their steps cost, and when they end a run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from sparring.errors import NotFinite

DROPPED_STEPS = 3
"""So many optimiser steps in a row whose gradient is not finite end the run."""


class FiniteSteps:
    """Count of the optimiser steps in a row that were dropped because their gradient was not finite.

    Args:
        name: of what is trained.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_a_row = 0

    def add(self, norm: float, tokens: float, version: int) -> dict[str, float]:
        """Count a step.

        Args:
            norm: the gradient's; not finite: nothing was updated.
            tokens: trained tokens of the step's batches.
            version: that the update of this step makes.

        Returns:
            Metrics of a dropped step, in the place of those of its batches: tokens_trained, 0, and tokens_dropped.

        Raises:
            NotFinite: it is the last of `DROPPED_STEPS` in a row.
        """
        if math.isfinite(norm):
            self._in_a_row = 0
            return {}
        self._in_a_row += 1
        if self._in_a_row >= DROPPED_STEPS:
            raise NotFinite(
                f"{self._name} step {version}: expected a finite gradient, got a norm of {norm} in {self._in_a_row} "
                "optimiser steps in a row, which trained nothing; begin another run (--name), from the input or a "
                "checkpoint of this one, with a lower train.learning_rate, a longer train.warmup_steps or a smaller "
                "train.gradient_clip"
            )
        return {"tokens_trained": 0.0, "tokens_dropped": tokens}


def check_finite(weights: Mapping[str, torch.Tensor], name: str, version: int) -> None:
    """Refuse weights that are not finite, before anybody serves or saves them.

    Raises:
        NotFinite: a weight is infinite or not a number.
    """
    for key, weight in weights.items():
        if weight.is_floating_point() and weight.numel():
            # one pass and no copy; NaN is the least and the largest of a tensor that has one
            least, largest = torch.aminmax(weight)
            if not (math.isfinite(least) and math.isfinite(largest)):
                raise NotFinite(
                    f"{name} step {version}: expected finite weights, got {least} to {largest} in {key}; what was "
                    "saved before is intact: begin another run (--name) from it, with a lower train.learning_rate or a "
                    "dtype of a wider range"
                )
