"""REINFORCE: the return as advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, members, returns, set_advantages
from sparring.types import Group, Sample


class Reinforce(BaseCredit, frozen=True, kw_only=True, tag="reinforce"):
    """REINFORCE: the return from a token on, less a constant.

        A_t = sum_{s >= t} discount^(s - t) * r_s - baseline

    A token's reward r_t is its own (annotation `reward`, such as a KL penalty), plus its turn's reward at the turn's
    last token, plus the rest of the outcome at the last token. Williams 1992. Use it as the simplest baseline, with
    groups of one, or with rewards that are already centred.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True
    tells_turns_apart: ClassVar[bool] = True

    discount: float = 1.0
    """Discount per token."""

    baseline: float = 0.0
    """Constant subtracted from every return."""

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount must lie between 0 and 1, got {self.discount}")

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        credited = []
        for group, rows in zip(groups, samples, strict=True):
            everyone = members(group, rows)
            values = {m.trajectory.id: self._advantages(m) for m in everyone}
            credited.append(set_advantages(rows, everyone, values, Member.with_steps))
        return credited

    def _advantages(self, member: Member) -> list[float]:
        rewards = member.step_rewards(self.discount)
        return [g - self.baseline for g in returns(rewards, self.discount, member.following())]
