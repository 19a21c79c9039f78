"""Baselines for roles whose task another role writes: each trajectory is compared with those that had the same task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, members, set_advantages
from sparring.algo.credit.statistics import centred
from sparring.types import Group, Sample


class Hierarchical(BaseCredit, frozen=True, kw_only=True, tag="hierarchical"):
    """Hierarchical baselines: proposers are compared across the group, solvers inside the rollout that posed their
    problem.

        A_i = r_i - mean(r of its peers)
        peers of a role in `inside`: the trajectories `role`, `role/0`, `role/1`, ... of the same rollout
        peers of any other role:     that role's trajectories in the whole group

    prime-rl's hierarchical GRPO compares in this way. Use it if one role writes the other's task: rollouts then differ
    in difficulty, and only attempts within one rollout are comparable. Without peers an advantage is 0; a group without
    any peers leaves the update.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True

    inside: tuple[str, ...] = ("solver",)
    """Roles that are compared inside a rollout."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        credited = []
        for group, rows in zip(groups, samples, strict=True):
            everyone = members(group, rows)
            peers: dict[tuple[str, str], list[Member]] = {}
            for m in everyone:
                family = m.trajectory.role.partition("/")[0]
                key = (family, m.rollout) if family in self.inside else (m.trajectory.role, "")
                peers.setdefault(key, []).append(m)
            advantages: dict[str, float] = {}
            for compared in peers.values():
                if len(compared) > 1:
                    advantages |= {
                        m.trajectory.id: a for m, a in zip(compared, centred([m.reward for m in compared]), strict=True)
                    }
            credited.append(set_advantages(rows, everyone, advantages, Member.with_advantage))
        return credited
