"""RAFT++: imitates successes, with a ratio and a clip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member


class RaftPlusPlus(BaseCredit, frozen=True, kw_only=True, tag="raft_plus_plus"):
    """RAFT++: every rollout that succeeded is imitated.

        A_i = 1 if r_i > solved_above, else 0

    Xiong et al., arXiv 2504.11343, section 2. With the token ratio and PPO's clip it is RAFT++; without a ratio it is
    rejection sampling on positives. Use it as the baseline that negative samples have to beat. A group without success
    leaves the update.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True

    solved_above: float = 0.5
    """Reward above which a rollout succeeded."""

    def advantages(self, members: Sequence[Member]) -> list[float] | None:
        solved = [m.reward > self.solved_above for m in members]
        return [float(right) for right in solved] if any(solved) else None
