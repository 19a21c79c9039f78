"""pass@k as the reward, with its advantage in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member


class PassAtK(BaseCredit, frozen=True, kw_only=True, tag="pass_at_k"):
    """pass@k training: a rollout's contribution to the probability that one of k rollouts solves the task.

        R     = 1 - C(m, k) / C(n, k)                       n members, m of them failed; the mean over all subsets of k
        sigma = sqrt(R * (1 - R))
        A(+)  = (1 - R) / sigma
        A(-)  = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / sigma

    Chen et al., arXiv 2508.10751, equations 14 and 15. If every subset of k has the same value, because each holds a
    success or none does, sigma is 0: the advantages are 0, and `zero_variance_filter` drops the group. Use it against a
    loss of exploration: tasks that are solved often give no gradient. A group of fewer than k members leaves the
    update.
    """

    sees_one_group: ClassVar[bool] = True

    k: int = 4
    """Number of attempts; at least one has to succeed. 1 is GRPO with the deviation over n."""

    solved_above: float = 0.5
    """Reward above which a rollout is solved."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    @property
    def least_members(self) -> int:  # type: ignore[override]  # of the setting k, where other rules have a number
        """Return max(2, k): smaller groups have no subset of k to compare."""
        return max(2, self.k)

    def says_nothing(self, rewards: Sequence[float]) -> bool:
        failed = sum(reward <= self.solved_above for reward in rewards)
        return len(rewards) < self.least_members or failed < self.k or failed == len(rewards)

    def advantages(self, members: Sequence[Member]) -> list[float] | None:
        rewards = [m.reward for m in members]
        solved = [reward > self.solved_above for reward in rewards]
        count, failed = len(solved), solved.count(False)
        if count < self.least_members:
            return None
        if self.says_nothing(rewards):
            return [0.0] * count
        none_solved = comb(failed, self.k) / comb(count, self.k)
        sigma = sqrt(none_solved * (1 - none_solved))
        with_a_failure = comb(failed - 1, self.k - 1) / comb(count - 1, self.k - 1)
        return [(none_solved if right else none_solved - with_a_failure) / sigma for right in solved]
