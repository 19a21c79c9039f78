"""GDPO: several rewards, each normalised before they are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, by_role, in_order, members
from sparring.algo.credit.statistics import standardised
from sparring.algo.facts import Facts
from sparring.errors import refusal
from sparring.types import Group, Sample


class Gdpo(BaseCredit, frozen=True, kw_only=True, tag="gdpo"):
    """GDPO: every named part of the score is normalised in its group, then their weighted sum over the update.

        A_k,i = (r_k,i - mean(r_k)) / (std(r_k) + epsilon)      per part k of the score, in the group
        S_i   = sum_k weight_k * A_k,i
        A_i   = (S_i - mean(S)) / (std(S) + epsilon)            over all rollouts of the update

    NVIDIA, arXiv 2601.05242, equations 4 to 7. Use it with several rewards of different scales, which GRPO's sum would
    let collapse into each other. The reward itself is not looked at, unless a score has no parts at all, such as that
    of a policy that broke its world: it then counts in the place of each. A group of one leaves the update.
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2601.05242, equations 4 to 7",
        defaults={"epsilon": "ours: it only keeps a division by 0 away"},
        differences=(),
    )

    least_members: ClassVar[int] = 2
    counts_token_rewards: ClassVar[bool] = False

    weights: dict[str, float]
    """The parts of the score that count, and how much each does."""

    epsilon: float = 1e-6
    """Added to standard deviations."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("weights must name at least one part of the score")

    def unread(self, parts: Sequence[str]) -> list[str]:
        """List the `parts` without a weight: the rule reads parts of the score, not their sum."""
        return [name for name in parts if name not in self.weights]

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages; see `protocols.Credit`.

        Raises:
            BadInput: a score lacks a part that has a weight, or none has any.
        """
        if groups and not any(score.parts for group in groups for score in group.scores):
            do = "have the environment or a rubric report them, or choose 'grpo'"
            raise refusal("[algo] credit 'gdpo'", "scores with parts", "none in the whole update", do)
        everyone = [members(group, rows) for group, rows in zip(groups, samples, strict=True)]
        compared = [role for of_group in everyone for role in by_role(of_group).values() if len(role) > 1]
        sums = {m.trajectory.id: value for role in compared for m, value in zip(role, self._sums(role), strict=True)}
        normal = dict(zip(sums, standardised(list(sums.values()), epsilon=self.epsilon), strict=True))
        credited = []
        for of_group, rows in zip(everyone, samples, strict=True):
            compared_members = [m for m in of_group if m.trajectory.id in normal]
            rows_of = (m.with_advantage(normal.get(m.trajectory.id, 0.0)) for m in of_group)
            credited.append(in_order(rows, rows_of, bool(compared_members)))
        return credited

    def _sums(self, role: Sequence[Member]) -> list[float]:
        """Compute each member's weighted sum of normalised parts."""
        for m in role:
            if (absent := [name for name in self.weights if name not in m.score.parts]) and m.score.parts:
                do = f"have the environment or a rubric report it; it reports {sorted(m.score.parts)}"
                raise refusal(
                    "[algo] credit 'gdpo' weights", f"a part {absent[0]!r} of every score", f"none of {m.rollout}", do
                )
        parts = [
            [weight * a for a in standardised([m.score.parts.get(name, m.outcome) for m in role], epsilon=self.epsilon)]
            for name, weight in self.weights.items()
        ]
        return [math.fsum(column) for column in zip(*parts, strict=True)]
