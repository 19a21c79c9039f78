"""Kahneman-Tversky optimisation: single replies, each wanted or unwanted.

Shapes: M weighted tokens of a micro-batch, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.algo.loss.preference.pairs import replies
from sparring.annotations import Annotation
from sparring.protocols import LossResult, Needs


class Kto:
    """Implements `Loss` after Ethayarajh et al. (arXiv 2402.01306, equation 8).

        r    = log pi(y|x) - log reference(y|x)
        z    = max(0, mean of r over mismatched rows), without gradient
        loss = sum_i weight_i * (lambda_i - value_i) / denominator
        value_i = wanted   * sigmoid(beta * (r_i - z))      where label_i = 1,  lambda_i = wanted
                  unwanted * sigmoid(beta * (z - r_i))      where label_i = -1, lambda_i = unwanted

    A mismatched row, of label 0, is the prompt of one example with the reply to another: its mean r estimates how far
    the policy is from the reference, which a survey finds.
    """

    term = "preference"
    needs = Needs(quantities=frozenset({"logprob"}), unit="sequence", survey=True)

    def __init__(self, *, beta: float = 0.1, wanted: float = 1.0, unwanted: float = 1.0) -> None:
        self.beta, self.wanted, self.unwanted = beta, wanted, unwanted

    def survey(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> dict[str, torch.Tensor]:
        """Compute `kto_shift` [M]: the mean of r over the mismatched rows of an optimiser step, the same at every
        token.

        Raises:
            ValueError: there is no such row.
        """
        reward, there = self._rewards(quantities, micro_batch)
        mismatched = reward[there & (micro_batch.label == 0)]
        if not len(mismatched):
            raise ValueError("expected mismatched rows (label 0) in a step of kto, got none; add them to the batch")
        return {Annotation.KTO_SHIFT: mismatched.double().mean().expand(len(micro_batch.targets))}

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's share of the update's loss.

        Args:
            quantities: `logprob` [M] float32 with gradient.
            micro_batch: `batch.tensors.MicroBatch` with the annotations `reference` and `kto_shift`.

        Returns:
            A scalar, and the metrics reward_chosen and reward_rejected (beta * r of wanted and of unwanted rows) and
            kto_shift (z) as (sum, count) over rows.
        """
        reward, there = self._rewards(quantities, micro_batch)
        label, shift = micro_batch.label.to(reward.dtype), micro_batch.annotations[Annotation.KTO_SHIFT][0].clamp(min=0)
        there = there & (label != 0)
        scale = torch.full_like(reward, self.unwanted).masked_fill(label > 0, self.wanted)
        value = scale * torch.sigmoid(self.beta * label * (reward - shift))
        weights = micro_batch.weights[self.term]
        of_row = weights.new_zeros(len(label)).index_add(0, micro_batch.rows, weights)
        loss = (of_row * (scale - value))[there].sum() / micro_batch.denominators[self.term]
        metrics: dict[str, tuple[float, float]] = {"kto_shift": (float(shift) * int(there.sum()), int(there.sum()))}
        for name, side in (("reward_chosen", there & (label > 0)), ("reward_rejected", there & (label < 0))):
            metrics[name] = (self.beta * float(reward.detach()[side].double().sum()), int(side.sum()))
        return LossResult(loss=loss, metrics=metrics)

    def _rewards(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute r of every row [R], and whether the term weighs the row [R]."""
        which = torch.where(micro_batch.weights[self.term] != 0, micro_batch.rows, -1)
        totals = replies(
            quantities["logprob"], micro_batch.annotations[Annotation.REFERENCE], which, len(micro_batch.label)
        )
        return totals.logprob - totals.reference, totals.length > 0
