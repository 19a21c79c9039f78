"""No correction: the engine's probabilities are the policy's that sampled."""

from __future__ import annotations

import torch

from sparring.protocols import Corrected


class NoCorrection:
    """Implements `Correction`. The ratio is to the recorded log-probability, as PPO has it, and nothing is weighed: right where
    the engine's numbers are the trainer's, as in exact numerics."""

    name = "none"

    def __call__(self, old: torch.Tensor, behaviour: torch.Tensor, ours: torch.Tensor) -> Corrected:
        """The recorded log-probabilities [M], weights of exactly 1."""
        return Corrected(anchor=behaviour, weights=torch.ones_like(behaviour), metrics={})
