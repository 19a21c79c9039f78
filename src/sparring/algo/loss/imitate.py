"""The imitation term: weighted negative log-likelihood of demonstrated tokens.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.protocols import LossResult, Needs


class ImitateLoss:
    """loss = - sum_t weight_t * logprob_t / denominator: supervised fine-tuning when the weights are a mask."""

    term = "imitate"
    needs = Needs(quantities=frozenset({"logprob"}))

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """The term's share of the update's loss: a scalar from `logprob` [M] float32 with gradient."""
        loss = -(micro_batch.weights[self.term] * quantities["logprob"]).sum() / micro_batch.denominators[self.term]
        return LossResult(loss=loss, metrics={})
