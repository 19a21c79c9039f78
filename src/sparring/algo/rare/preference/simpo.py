"""Simple preference optimisation: without a reference, with rewards per token and a target margin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from sparring.algo.loss.preference.pairs import ReplySums


@dataclass(frozen=True, kw_only=True)
class SimPo:
    """SimPO, Meng et al. (arXiv 2405.14734, equation 6). Implements `PairForm`.

    reward = beta / length * log pi(y|x)
    loss   = -log sigmoid(margin - gamma)
    """

    beta: float = 2.0
    gamma: float = 1.0
    name: str = "simpo"
    has_reference: bool = False

    def reward(self, replies: ReplySums) -> torch.Tensor:
        return self.beta * replies.logprob / replies.length

    def loss(self, margin: torch.Tensor) -> torch.Tensor:
        return -logsigmoid(margin - self.gamma)
