"""ReMax: the greedy rollout is the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, members, set_advantages
from sparring.algo.credit.statistics import mean
from sparring.errors import refusal
from sparring.types import Group, Sample


class Remax(BaseCredit, frozen=True, kw_only=True, tag="remax"):
    """ReMax: a rollout's reward less the reward of greedy decoding on the same task.

        A_i = r_i - r(greedy)

    Li et al., arXiv 2310.10505. Use it with one sampled rollout per task. The baseline is the mean reward of the
    group's greedy rollouts (`baselines`); a group whose baseline was lost to infrastructure leaves the update.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True
    needs_baselines: ClassVar[bool] = True

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages; refuse a group without a baseline rollout (`BadInput`)."""
        credited = []
        for group, rows in zip(groups, samples, strict=True):
            if not group.baselines and not any(rollout.purpose == "baseline" for rollout in group.failed):
                fix = "let the scheduler add a greedy rollout, or choose 'rloo'"
                raise refusal("[algo] credit 'remax'", "a baseline rollout per task", f"none in group {group.id}", fix)
            everyone = members(group, rows)
            advantages = {}
            for m in everyone if group.baselines else ():
                greedy = [replace(m, score=score, rows=()).outcome for score in group.baselines]
                advantages[m.trajectory.id] = m.reward - mean(greedy)
            credited.append(set_advantages(rows, everyone, advantages, Member.with_advantage))
        return credited
