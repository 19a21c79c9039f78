"""GPG: plain group policy gradient, scaled to make up for groups without signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, by_role, members, per_trajectory
from sparring.algo.credit.statistics import centred, deviation
from sparring.types import Group, Sample, alike


class Gpg(BaseCredit, frozen=True, kw_only=True, tag="gpg"):
    """GPG: centred rewards, scaled up by the share of rollouts that give no signal.

        A_i   = alpha * (r_i - mean(r)) / F
        alpha = B / (B - M)      B: rollouts of the update; M: rollouts in groups with equal rewards
        F     = 1, or the group's standard deviation + epsilon

    Chu et al., arXiv 2504.02546. Use it without a clip and without a zero-variance filter: alpha keeps the size of the
    gradient when most groups are solved. A group of one counts among M and leaves the update.
    """

    least_members: ClassVar[int] = 2

    divide: bool = False
    """Divide by the group's standard deviation."""

    epsilon: float = 1e-6
    """Constant added to standard deviations."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        compared = [
            role for group, rows in zip(groups, samples, strict=True) for role in by_role(members(group, rows)).values()
        ]
        useful = sum(len(role) for role in compared if not alike([m.reward for m in role]))
        alpha = sum(map(len, compared)) / useful if useful else 0.0

        def advantages(role: Sequence[Member]) -> list[float] | None:
            rewards = [m.reward for m in role]
            scale = deviation(rewards) + self.epsilon if self.divide else 1.0
            return [alpha * c / scale for c in centred(rewards)] if len(role) > 1 else None

        return per_trajectory(groups, samples, advantages)
