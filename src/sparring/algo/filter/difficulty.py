"""Difficulty filter: selects groups by their share of solved rollouts."""

from __future__ import annotations

from sparring.algo.base import NamedRule
from sparring.types import Group, Score


class Difficulty(NamedRule, frozen=True, kw_only=True, tag="difficulty"):
    """Difficulty filter: only groups whose share of solved rollouts lies in a range are trained.

        lowest < solved / members < highest

    A rollout is solved if the score's `success` is true; without a `success`, if its reward is above solved_above.
    Rollouts lost to infrastructure count neither as solved nor as members. Use it to spend updates on tasks that the
    policy solves sometimes. The defaults drop tasks that it always or never solves: DAPO's dynamic sampling (arXiv
    2503.14476, equation 11), for rewards that need not be 0 or 1.
    """

    lowest: float = 0.0
    """Lower end of the range; see `inclusive`."""

    highest: float = 1.0
    """Upper end of the range; see `inclusive`."""

    inclusive: bool = False
    """Also train groups whose share is exactly `lowest` or `highest`."""

    solved_above: float = 0.5
    """Reward above which a rollout without `success` is solved."""

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ValueError(
                f"lowest and highest must lie between 0 and 1, lowest first, got {self.lowest} and {self.highest}"
            )
        if not self.inclusive and self.lowest == self.highest:
            raise ValueError(f"lowest must be below highest unless inclusive = true, got {self.lowest} twice")

    def keep(self, group: Group) -> bool:
        """Return whether the group is trained; a group without members is not."""
        if not group.scores:
            return False
        share = sum(map(self._is_solved, group.scores)) / len(group.scores)
        inside = self.lowest < share < self.highest
        return inside or (self.inclusive and share in (self.lowest, self.highest))

    def _is_solved(self, score: Score) -> bool:
        return score.success if score.success is not None else (score.reward or 0.0) > self.solved_above
