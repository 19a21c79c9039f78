"""One ratio per turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.ratio.sequence import mean_ratio
from sparring.algo.tokens import PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class TurnRatio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="turn", tag_field="name"):
    """exp(mean over the turn of log r_t), the same for all tokens of one turn: the sequence's ratio (GSPO, arXiv
    2507.18071, equation 7) of what an agent does at once.
    """

    facts: ClassVar[Facts] = Facts(
        source="ours: the sequence's ratio (arXiv 2507.18071, equation 7) of one turn",
        defaults={"per_token": "off"},
        differences=(),
    )

    unit: ClassVar[Unit] = "turn"

    per_token: bool = False
    """Whether each token keeps its own gradient, as for the ratio `sequence`."""

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """The logarithm of each token's ratio [M]."""
        return mean_ratio(tokens, self.unit, per_token=self.per_token)
