"""pass@k as the reward, with its advantage in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

import msgspec

from sparring.algo.credit.members import Member, per_trajectory
from sparring.types import Group, Sample


class PassAtK(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pass_at_k", tag_field="name"):
    """pass@k training: what a rollout adds to the chance that one of k solves the task.

        R     = 1 - C(m, k) / C(n, k)                       n members, m of them failed; the mean over all subsets of k
        sigma = sqrt(R * (1 - R))
        A(+)  = (1 - R) / sigma
        A(-)  = (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / sigma

    Chen et al., arXiv 2508.10751, equations 14 and 15. Every advantage is 0 where sigma is. Use it where exploration dies:
    solved tasks stop pushing early. A group of fewer than k members leaves the update.
    """

    k: int = 4
    """Attempts of which one has to succeed. 1 is GRPO with the deviation over n."""

    solved_above: float = 0.5
    """A rollout is solved when its reward is above this."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError("k must be at least 1")

    @property
    def least_members(self) -> int:
        """Below this, a group has no subset of k."""
        return max(2, self.k)

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages; see `protocols.Credit`."""
        return per_trajectory(groups, samples, self._advantages)

    def _advantages(self, members: Sequence[Member]) -> list[float] | None:
        solved = [m.reward > self.solved_above for m in members]
        count, failed = len(solved), solved.count(False)
        if count < self.least_members:
            return None
        none_solved = comb(failed, self.k) / comb(count, self.k)
        sigma = sqrt(none_solved * (1 - none_solved))
        if not sigma:
            return [0.0] * count
        with_a_failure = comb(failed - 1, self.k - 1) / comb(count - 1, self.k - 1)
        return [(none_solved if right else none_solved - with_a_failure) / sigma for right in solved]
