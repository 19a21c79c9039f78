"""MaxRL: maximum likelihood of success."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member
from sparring.algo.credit.statistics import centred, mean


class MaxRl(BaseCredit, frozen=True, kw_only=True, tag="maxrl"):
    """MaxRL: centred rewards divided by their mean, so that rare success weighs more.

        A_i = (r_i - mean(r)) / mean(r)      0 if mean(r) is 0

    Tajwar et al., arXiv 2602.02710: for N rewards of 0 or 1 this is an unbiased gradient of the first N - 1 terms of
    log p(success) = -sum_k (1 - p)^k / k; their theorem 2 has N terms, without subtracting the mean. RLOO estimates the
    gradient of p itself. Use it for hard tasks with cheap samples. A group of one leaves the update.
    """

    least_members: ClassVar[int] = 2
    sees_one_group: ClassVar[bool] = True
    needs_nonnegative_rewards: ClassVar[bool] = True

    def advantages(self, members: Sequence[Member]) -> list[float] | None:
        rewards = [m.reward for m in members]
        if min(rewards) < 0:
            raise ValueError(
                f"rollout {members[0].rollout}: expected rewards of at least 0 with maxrl, which divides by their "
                f"mean, got {min(rewards)}"
            )
        average = mean(rewards)
        if len(members) < 2:
            return None
        return [c / average for c in centred(rewards)] if average else [0.0] * len(rewards)
