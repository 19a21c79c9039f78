"""One ratio per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.tokens import PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class TokenRatio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="token", tag_field="name"):
    """r_t = pi(y_t) / anchor(y_t): PPO (arXiv 1707.06347, section 3)."""

    facts: ClassVar[Facts] = Facts(
        source="arXiv 1707.06347, section 3",
        defaults={},
        differences=(),
    )

    unit: ClassVar[Unit] = "token"

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """The logarithm of each token's ratio [M]."""
        return tokens.log_ratio
