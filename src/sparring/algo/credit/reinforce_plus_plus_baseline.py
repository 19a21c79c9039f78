"""REINFORCE++ with the group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, by_role, members
from sparring.algo.credit.reinforce_plus_plus import over_the_update
from sparring.algo.credit.statistics import centred
from sparring.types import Group, Sample


class ReinforcePlusPlusBaseline(BaseCredit, frozen=True, kw_only=True, tag="reinforce_plus_plus_baseline"):
    """REINFORCE++ with baseline: rewards less the group's mean, normalised over the update.

        A'_i = r_i - mean(r of the group)
        A_t  = (A'_t - mean(A')) / (std(A') + epsilon)      mean and std over every sampled token of the update

    Hu et al., arXiv 2501.03262, equations 6 and 7. Use it for reasoning with groups: GRPO's division by the group's own
    deviation inflates nearly solved and nearly hopeless tasks. A group of one has no baseline and leaves the update.
    """

    least_members: ClassVar[int] = 2

    epsilon: float = 1e-8
    """Constant added to the standard deviation."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        everyone = [members(group, rows) for group, rows in zip(groups, samples, strict=True)]
        return over_the_update(
            everyone, [_centred_rewards(of_group) for of_group in everyone], samples, epsilon=self.epsilon
        )


def _centred_rewards(of_group: Sequence[Member]) -> list[list[float]] | None:
    """Compute each member's reward less its role's mean, once per step; None if no role has two members."""
    roles = by_role(of_group).values()
    if all(len(role) < 2 for role in roles):
        return None
    less = {
        m.trajectory.id: value
        for role in roles
        for m, value in zip(role, centred([m.reward for m in role]), strict=True)
    }
    return [[less[m.trajectory.id]] * m.length for m in of_group]
