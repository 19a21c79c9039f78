"""Rejection fine-tuning: imitates each distinct successful solution once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member


class Rejection(BaseCredit, frozen=True, kw_only=True, tag="rejection"):
    """Rejection fine-tuning: distinct successful rollouts are imitated.

        A_i = 1 if r_i > solved_above, no earlier member sampled the same tokens and fewer than `at_most` were taken,
        else 0

    Yuan et al., arXiv 2308.01825, section 3.3. Use it without a ratio, as supervised learning on the policy's own
    successes; `at_most` keeps easy tasks from crowding out hard ones. A group without success leaves the update.
    """

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True

    solved_above: float = 0.5
    """Reward above which a rollout succeeded."""

    at_most: int | None = None
    """Largest number of imitated members per group and role; None is no limit."""

    def __post_init__(self) -> None:
        if self.at_most is not None and self.at_most < 1:
            raise ValueError(f"at_most must be at least 1, got {self.at_most}")

    def advantages(self, members: Sequence[Member]) -> list[float] | None:
        seen: set[tuple[tuple[int, ...], ...]] = set()
        taken = []
        for m in members:
            answer = tuple(turn.tokens for turn in m.trajectory.turns)
            room = self.at_most is None or len(seen) < self.at_most
            take = m.reward > self.solved_above and answer not in seen and room
            if take:
                seen.add(answer)
            taken.append(float(take))
        return taken if seen else None
