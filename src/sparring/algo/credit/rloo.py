"""REINFORCE leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member
from sparring.algo.credit.statistics import against_others


class Rloo(BaseCredit, frozen=True, kw_only=True, tag="rloo"):
    """RLOO: a rollout's reward less the mean of its siblings'.

        A_i = r_i - 1 / (n - 1) * sum_{j != i} r_j

    Kool et al. 2019; Ahmadian et al., arXiv 2402.14740, section 2.2. Use it for small groups, which need an unbiased
    baseline, and for rewards with a meaningful scale. A member without siblings has no baseline: a group of one leaves
    the update.
    """

    least_members: ClassVar[int] = 2
    sees_one_group: ClassVar[bool] = True

    def advantages(self, members: Sequence[Member]) -> list[float] | None:
        return against_others([member.reward for member in members]) if len(members) > 1 else None
