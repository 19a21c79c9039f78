"""Direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import ReplySums


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """DPO, Rafailov et al. (arXiv 2305.18290, equation 7). Implements `PairForm`.

        reward = beta * (log pi(y|x) - log reference(y|x))
        loss   = -(1 - s) * log sigmoid(margin) - s * log sigmoid(-margin)

    The label smoothing s is the assumed share of swapped labels: conservative DPO (Mitchell 2023, "A note on DPO with
    noisy preferences"). The gradient is 0 at sigmoid(margin) = 1 - s.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    name: str = "dpo"
    has_reference: bool = True

    def reward(self, replies: ReplySums) -> torch.Tensor:
        return self.beta * (replies.logprob - replies.reference)

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        wrong = self.label_smoothing
        return -(1.0 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
