"""Imitation term: weighted negative log-likelihood of demonstrated tokens.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.protocols import LossResult, Needs


class ImitateLoss:
    """loss = - scale * sum_t weight_t * logprob_t / denominator. With a 0/1 mask as weights this is supervised
    fine-tuning."""

    term = "imitate"
    needs = Needs(quantities=frozenset({"logprob"}))

    def __init__(self, *, scale: float = 1.0) -> None:
        self._scale = scale

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss: a scalar from `logprob` [M] float32 with gradient."""
        total = (micro_batch.weights[self.term] * quantities["logprob"]).sum()
        return LossResult(loss=-self._scale * total / micro_batch.denominators[self.term], metrics={})
