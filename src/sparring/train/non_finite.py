"""Handling of gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from sparring.errors import NotFinite

DROPPED_STEPS = 3
"""Number of consecutive optimiser steps with a non-finite gradient that ends the run."""
DROPPED = "dropped_in_a_row"
"""Key of a checkpoint's manifest for `FiniteSteps.in_a_row`."""


class FiniteSteps:
    """Counter of consecutive optimiser steps that were dropped because of a non-finite gradient.

    Attributes:
        in_a_row: number of dropped steps since the last finite gradient; a resumed run restores this number.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.in_a_row = 0

    def add(self, norm: float, tokens: float, version: int) -> dict[str, float]:
        """Record an optimiser step with a gradient of this norm, and return metrics that replace those of its batches.

        With a finite norm the result is empty. Otherwise the step has changed nothing: tokens_trained is 0, and
        tokens_dropped is `tokens`. The last of `DROPPED_STEPS` such steps in a row raises `NotFinite`.
        """
        if math.isfinite(norm):
            self.in_a_row = 0
            return {}
        self.in_a_row += 1
        if self.in_a_row >= DROPPED_STEPS:
            raise NotFinite(
                f"{self._name} step {version}: expected a finite gradient, got a norm of {norm} in {self.in_a_row} "
                "optimiser steps in a row, which trained nothing; begin another run (--name), from the input or a "
                "checkpoint of this one, with a lower train.learning_rate, a longer train.warmup_steps or a smaller "
                "train.gradient_clip"
            )
        return {"tokens_trained": 0.0, "tokens_dropped": tokens}


def check_finite(weights: Mapping[str, torch.Tensor], name: str, version: int) -> None:
    """Refuse weights that are infinite or not a number (`NotFinite`), before they are served or saved."""
    for key, weight in weights.items():
        if weight.is_floating_point() and weight.numel():
            # one pass without a copy; a NaN becomes both minimum and maximum
            least, largest = torch.aminmax(weight)
            if not (math.isfinite(least) and math.isfinite(largest)):
                raise NotFinite(
                    f"{name} step {version}: expected finite weights, got {least} to {largest} in {key}; what was "
                    "saved before is intact: begin another run (--name) from it, with a lower train.learning_rate or a "
                    "dtype of a wider range"
                )
