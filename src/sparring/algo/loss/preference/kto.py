"""Kahneman-Tversky optimisation: single replies, each wanted or unwanted.

Shapes: M weighted tokens of a micro-batch, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.algo.loss.preference.pairs import replies
from sparring.annotations import Annotation
from sparring.kernels.threads import add_at
from sparring.protocols import LossResult, Needs


class Kto:
    """KTO, Ethayarajh et al. (arXiv 2402.01306, equation 8). Implements `Loss`.

        r    = log pi(y|x) - log reference(y|x)
        z    = max(0, mean of r over mismatched rows), without gradient
        loss = sum_i weight_i * (lambda_i - value_i) / denominator
        value_i = wanted   * sigmoid(beta * (r_i - z))      for label_i = 1,  lambda_i = wanted
                  unwanted * sigmoid(beta * (z - r_i))      for label_i = -1, lambda_i = unwanted

    A mismatched row, with label 0, pairs the prompt of one example with the reply to another. The mean r of mismatched
    rows estimates the KL from the reference; it is computed in a first pass (`survey`).
    """

    term = "preference"
    needs = Needs(quantities=frozenset({"logprob"}), unit="sequence", survey=True)

    def __init__(self, *, beta: float = 0.1, wanted: float = 1.0, unwanted: float = 1.0) -> None:
        self.beta, self.wanted, self.unwanted = beta, wanted, unwanted

    def survey(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> dict[Annotation, torch.Tensor]:
        """Compute `kto_shift` [M], the mean of r over the mismatched rows of an optimiser step, equal at every token;
        refuse a step without such rows (`ValueError`)."""
        reward, weighted_rows = self._rewards(quantities, micro_batch)
        mismatched = reward[weighted_rows & (micro_batch.label == 0)]
        if not len(mismatched):
            raise ValueError("expected mismatched rows (label 0) in a step of kto, got none; add them to the batch")
        return {Annotation.KTO_SHIFT: mismatched.double().mean().expand(len(micro_batch.targets))}

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss from `logprob` [M] float32 with gradient and the annotations `reference`
        and `kto_shift`.

        Returns:
            A scalar, and as (sum, count) over rows the metrics reward_chosen and reward_rejected (beta * r of wanted
                and of unwanted rows) and kto_shift (z).
        """
        reward, trained_rows = self._rewards(quantities, micro_batch)
        label, shift = micro_batch.label.to(reward.dtype), micro_batch.annotations[Annotation.KTO_SHIFT][0].clamp(min=0)
        trained_rows = trained_rows & (label != 0)
        scale = torch.full_like(reward, self.unwanted).masked_fill(label > 0, self.wanted)
        value = scale * torch.sigmoid(self.beta * label * (reward - shift))
        weights = micro_batch.weights[self.term]
        of_row = add_at(micro_batch.rows, weights, len(label))
        loss = (of_row * (scale - value))[trained_rows].sum() / micro_batch.denominators[self.term]
        metrics: dict[str, tuple[float, float]] = {
            "kto_shift": (float(shift) * int(trained_rows.sum()), int(trained_rows.sum()))
        }
        for name, side in (
            ("reward_chosen", trained_rows & (label > 0)),
            ("reward_rejected", trained_rows & (label < 0)),
        ):
            metrics[name] = (self.beta * float(reward.detach()[side].double().sum()), int(side.sum()))
        return LossResult(loss=loss, metrics=metrics)

    def _rewards(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute r of each row [R], and a mask of the rows with weight in the term [R]."""
        which = torch.where(micro_batch.weights[self.term] != 0, micro_batch.rows, -1)
        totals = replies(
            quantities["logprob"], micro_batch.annotations[Annotation.REFERENCE], which, len(micro_batch.label)
        )
        return totals.logprob - totals.reference, totals.length > 0
