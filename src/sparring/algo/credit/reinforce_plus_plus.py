"""REINFORCE++: returns normalised over the whole update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, members, returns, set_advantages
from sparring.algo.credit.statistics import standardised
from sparring.types import Group, Sample


class ReinforcePlusPlus(BaseCredit, frozen=True, kw_only=True, tag="reinforce_plus_plus"):
    """REINFORCE++: a token's return, normalised over all tokens of the update.

        G_t = sum_{s >= t} r_s           r_s includes a KL penalty, if annotated
        A_t = (G_t - mean(G)) / (std(G) + epsilon)      mean and std over every sampled token of the update

    Hu et al., arXiv 2501.03262, equations 4 and 5. Use it for general RLHF with one rollout per prompt: the update's
    mean is the baseline.
    """

    least_members: ClassVar[int] = 1
    tells_turns_apart: ClassVar[bool] = True

    epsilon: float = 1e-8
    """Constant added to the standard deviation."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        everyone = [members(group, rows) for group, rows in zip(groups, samples, strict=True)]
        to_go = [[returns(m.step_rewards(1.0), 1.0, m.following()) for m in of_group] for of_group in everyone]
        return over_the_update(everyone, to_go, samples, epsilon=self.epsilon)


def over_the_update(
    everyone: Sequence[Sequence[Member]],
    values: Sequence[Sequence[Sequence[float]] | None],
    samples: Sequence[Sequence[Sample]],
    *,
    epsilon: float,
) -> list[list[Sample]]:
    """Set values of each member's steps, by group, as advantages, standardised over all steps of the update; a group
    without values leaves the update."""
    normal = iter(
        standardised([v for group in values if group for steps in group for v in steps], epsilon=epsilon, lost=0)
    )
    credited = []
    for of_group, group, rows in zip(everyone, values, samples, strict=True):
        advantages = {
            m.trajectory.id: [next(normal) for _ in steps]
            for m, steps in zip(of_group, group or (), strict=bool(group))
        }
        credited.append(set_advantages(rows, of_group, advantages, Member.with_steps))
    return credited
