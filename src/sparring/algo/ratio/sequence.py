"""One ratio per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from sparring.algo.facts import Facts
from sparring.algo.tokens import PolicyTokens, Unit

if TYPE_CHECKING:
    import torch


class SequenceRatio(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sequence", tag_field="name"
):
    """s_i = exp(mean over the sequence of log r_t), the same for all its tokens: GSPO (arXiv 2507.18071, equation 7).

    With `per_token` its value is that of the sequence and its gradient each token's own: stop_gradient(s_i) * pi /
    stop_gradient(pi), which is what advantages that differ within a sequence need (GSPO-token, equation 14).
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2507.18071, equation 7; `per_token` equation 14",
        defaults={"per_token": "off"},
        differences=(
            (
                "A sequence is one row: where a trajectory branches, tokens that an earlier branch claims are in no "
                "other's ratio."
            ),
        ),
    )

    unit: ClassVar[Unit] = "sequence"

    per_token: bool = False
    """Whether each token keeps its own gradient."""

    def __call__(self, tokens: PolicyTokens) -> torch.Tensor:
        """The logarithm of each token's ratio [M]."""
        return mean_ratio(tokens, self.unit, per_token=self.per_token)


def mean_ratio(tokens: PolicyTokens, unit: Unit, *, per_token: bool) -> torch.Tensor:
    """The mean of log r_t over each token's unit [M]."""
    if per_token:
        return tokens.mean(tokens.log_ratio.detach(), unit) + (tokens.logprob - tokens.logprob.detach())
    return tokens.mean(tokens.log_ratio, unit)
