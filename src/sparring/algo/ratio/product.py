"""One probability ratio per sequence, not divided by its length."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.tokens import PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class ProductRatio(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="product", tag_field="name"
):
    """exp(sum over the sequence of log r_t), the same for all its tokens: the importance weight of a whole trajectory
    (Precup, Sutton and Singh 2000). Unbiased, and of a variance that grows with the length: for gates that tame it,
    such as `topr` and `vespo`.
    """

    facts: ClassVar[Facts] = Facts(
        source="Precup, Sutton and Singh 2000",
        defaults={},
        differences=(
            (
                "A sequence is one row: where a trajectory branches, tokens that an earlier branch claims are in no "
                "other's ratio."
            ),
        ),
    )

    unit: ClassVar[Unit] = "sequence"

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """The logarithm of each token's ratio [M]."""
        return tokens.sum(tokens.log_ratio, self.unit)
