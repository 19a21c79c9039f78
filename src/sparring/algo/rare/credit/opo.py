"""OPO: the variance-optimal baseline if gradient norms grow with length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member
from sparring.types import alike


class Opo(BaseCredit, frozen=True, kw_only=True, tag="opo"):
    """OPO: rewards less their length-weighted mean.

        A_i = r_i - sum_j l_j * r_j / sum_j l_j          l: sampled tokens

    Hao et al., arXiv 2505.23585: the variance-optimal baseline if the squared norm of a response's gradient is
    proportional to its length. Use it strictly on policy. A group of one has no baseline and leaves the update.
    """

    least_members: ClassVar[int] = 2
    sees_one_group: ClassVar[bool] = True

    def advantages(self, members: Sequence[Member]) -> list[float] | None:
        rewards, lengths = [m.reward for m in members], [m.length for m in members]
        if len(members) < 2 or not sum(lengths):
            return None
        if alike(rewards):
            return [0.0] * len(rewards)
        baseline = math.fsum(length * reward for length, reward in zip(lengths, rewards, strict=True)) / sum(lengths)
        return [reward - baseline for reward in rewards]
