"""GDPO: several rewards, each normalised before they are summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, by_role, members, set_advantages
from sparring.algo.credit.statistics import standardised
from sparring.types import Group, Sample


class Gdpo(BaseCredit, frozen=True, kw_only=True, tag="gdpo"):
    """GDPO: each named part of the score is normalised within the group; then the weighted sum of the parts is
    normalised over the update.

        A_k,i = (r_k,i - mean(r_k)) / (std(r_k) + epsilon)      per part k of the score, in the group
        S_i   = sum_k weight_k * A_k,i
        A_i   = (S_i - mean(S)) / (std(S) + epsilon)            over all rollouts of the update

    NVIDIA, arXiv 2601.05242, equations 4 to 7. Use it with several rewards of different scales, whose differences
    GRPO's sum would blur. A part that all members of a group lack, such as one from another domain, is ignored in this
    group. A part that only some members lack is 0 for them. A score without any parts, as after a rollout in which the
    policy broke its world, counts with its reward in place of each part. A group of one leaves the update.
    """

    least_members: ClassVar[int] = 2
    counts_token_rewards: ClassVar[bool] = False

    weights: dict[str, float]
    """Weight of each part of the score that counts, by name."""

    epsilon: float = 1e-6
    """Constant added to standard deviations."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("weights must name at least one part of the score")

    @property
    def parts_read(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def unread(self, parts: Sequence[str]) -> list[str]:
        return [name for name in parts if name not in self.weights]

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        everyone = [members(group, rows) for group, rows in zip(groups, samples, strict=True)]
        compared = [role for of_group in everyone for role in by_role(of_group).values() if len(role) > 1]
        sums = {
            m.trajectory.id: value
            for role in compared
            for m, value in zip(role, self._weighted_sums(role), strict=True)
        }
        normal = dict(zip(sums, standardised(list(sums.values()), epsilon=self.epsilon), strict=True))
        return [
            set_advantages(rows, of_group, normal, Member.with_advantage)
            for of_group, rows in zip(everyone, samples, strict=True)
        ]

    def _weighted_sums(self, role: Sequence[Member]) -> list[float]:
        columns = [
            [weight * a for a in standardised(values, epsilon=self.epsilon)]
            for name, weight in self.weights.items()
            if (values := _part_values(role, name)) is not None
        ]
        return [math.fsum(column) for column in zip(*columns, strict=True)] if columns else [0.0] * len(role)


def _part_values(role: Sequence[Member], name: str) -> list[float] | None:
    """Return the value of a part for each member; None if some scores have parts but none has this one."""
    if any(m.score.parts for m in role) and not any(name in m.score.parts for m in role):
        return None
    return [m.score.parts.get(name, 0.0) if m.score.parts else m.outcome for m in role]
