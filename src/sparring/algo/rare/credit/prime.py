"""PRIME: implicit process rewards in addition to the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, by_role, members, returns, set_advantages
from sparring.algo.credit.statistics import against_others, mean
from sparring.algo.right_answers import is_right
from sparring.annotations import Annotation
from sparring.types import Group, Sample


class Prime(BaseCredit, frozen=True, kw_only=True, tag="prime"):
    """PRIME: leave-one-out advantages of the outcome and of implicit token rewards, from a language model trained on
    outcomes.

        r_i,t = beta * (log p_implicit(y_t) - log p_reference(y_t))
        A_i,t = sum_{s >= t} discount^(s - t) * (r_i,s - mean_{j != i}(mean_t(r_j,t)))  +  o_i - mean_{j != i}(o_j)

    Cui et al., arXiv 2502.01456, equation 5. The annotations `implicit` and `reference` are log-probabilities of the
    sampled tokens under the implicit process reward model (`[rl.implicit]`) and under the model it was trained from; o
    is the reward. The annotation `right`, from which that model learns next, is 1 for rollouts with `success`; without
    a `success`, for a reward above solved_above. Use it for dense credit without step labels. A group of one leaves the
    update.
    """

    least_members: ClassVar[int] = 2
    reads: ClassVar[tuple[Annotation, ...]] = (Annotation.IMPLICIT, Annotation.REFERENCE)

    beta: float = 0.05
    """Scale of the implicit reward."""

    discount: float = 1.0
    """Discount per token."""

    solved_above: float = 0.5
    """Reward above which a rollout is right."""

    def __post_init__(self) -> None:
        if not self.beta > 0 or not 0 <= self.discount <= 1:
            raise ValueError(f"beta must be above 0 and discount between 0 and 1, got {self.beta} and {self.discount}")

    @property
    def implicit_scale(self) -> float:
        return self.beta

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        credited = []
        for group, rows in zip(groups, samples, strict=True):
            everyone = members(group, rows)
            values: dict[str, list[float]] = {}
            for role in by_role(everyone).values():
                values |= self._role_advantages([m for m in role if m.rows])
            credited.append(set_advantages(rows, [self._with_label(m) for m in everyone], values, Member.with_steps))
        return credited

    def _with_label(self, member: Member) -> Member:
        right = float(is_right(member.score, member.trajectory.role, self.solved_above))
        return replace(member, rows=member.with_steps([right] * member.length, Annotation.RIGHT))

    def _role_advantages(self, role: Sequence[Member]) -> dict[str, list[float]]:
        if len(role) < 2:
            return {}
        implied = [
            [
                self.beta * (a - b)
                for a, b in zip(
                    m.read(Annotation.IMPLICIT, "prime"), m.read(Annotation.REFERENCE, "prime"), strict=True
                )
            ]
            for m in role
        ]
        means = [mean(rewards) for rewards in implied]
        outcomes = against_others([m.reward for m in role])
        values = {}
        for m, rewards, own, less, outcome in zip(role, implied, means, against_others(means), outcomes, strict=True):
            others = own - less
            implicit = m.earned([r - others for r in rewards], self.discount)
            to_go = returns(implicit, self.discount, m.following())
            values[m.trajectory.id] = [value + outcome for value in to_go]
        return values
