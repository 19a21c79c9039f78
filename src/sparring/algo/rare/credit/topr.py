"""TOPR: signed rewards, for a gate that treats successes and failures differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member


class Topr(BaseCredit, frozen=True, kw_only=True, tag="topr"):
    """TOPR's signed reward: rollouts above a constant are reinforced, those below it discouraged.

        A_i = r_i - baseline

    Le Roux et al., arXiv 2503.14286, equations 7 and 8. The gate `topr` is the other half: no ratio for positive A, a
    sequence ratio clipped to [0, 1] for negative A. Use both on data that is far off policy. The baseline sets the
    weight of failures against successes: 0 for rewards of -1 and 1, 0.5 for 0 and 1.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True

    baseline: float = 0.0
    """Constant subtracted from every reward."""

    def advantages(self, members: Sequence[Member]) -> list[float]:
        return [m.reward - self.baseline for m in members]
