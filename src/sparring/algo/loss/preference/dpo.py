"""Direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import ReplySums


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """Implements `PairForm` after Rafailov et al. (arXiv 2305.18290, equation 7).

        reward = beta * (log pi(y|x) - log reference(y|x))
        loss   = -(1 - s) * log sigmoid(margin) - s * log sigmoid(-margin)

    The label smoothing s is how often a label is thought to be the wrong way round: conservative DPO (Mitchell 2023, "A
    note on DPO with noisy preferences"). The gradient vanishes where sigmoid(margin) = 1 - s.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    name: str = "dpo"
    has_reference: bool = True

    def reward(self, replies: ReplySums) -> torch.Tensor:
        """Return implicit rewards, in nats times beta."""
        return self.beta * (replies.logprob - replies.reference)

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        """Compute the loss [P] of margins [P]."""
        wrong = self.label_smoothing
        return -(1.0 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
