"""Tasks of the right difficulty."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from sparring.algo.facts import Facts
from sparring.types import Group, Score


class Difficulty(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="difficulty", tag_field="name"
):
    """Difficulty filter: groups whose share of success lies in a range are trained.

        lowest < solved / members < highest

    Solved is what the scorer's `success` says, or a reward above solved_above where it says nothing; members that
    failed for an infrastructure reason count on neither side. Use it to spend updates on what the policy can half do;
    with the defaults, what it always or never solves is left out (DAPO's dynamic sampling, arXiv 2503.14476, equation
    11, for rewards that are not 0 and 1).
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2503.14476, equation 11, and arXiv 2502.01456 with a range",
        defaults={
            "lowest": "equation 11",
            "highest": "equation 11",
            "inclusive": "equation 11",
            "solved_above": "ours: between a failure's 0 and a success's 1",
        },
        differences=("What is left out is not replaced by other tasks: an update has fewer groups.",),
    )

    lowest: float = 0.0
    """Smallest share; see `inclusive`."""

    highest: float = 1.0
    """Largest share; see `inclusive`."""

    inclusive: bool = False
    """Train groups whose share is exactly `lowest` or `highest` too."""

    solved_above: float = 0.5
    """A member succeeded when its reward is above this."""

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ValueError(
                f"lowest and highest must lie between 0 and 1, lowest first, got {self.lowest} and {self.highest}"
            )
        if not self.inclusive and self.lowest == self.highest:
            raise ValueError(f"lowest must be below highest unless inclusive = true, got {self.lowest} twice")

    def keep(self, group: Group) -> bool:
        """Return whether the group is trained; one without members is not."""
        if not group.scores:
            return False
        share = sum(map(self._solved, group.scores)) / len(group.scores)
        inside = self.lowest < share < self.highest
        return inside or (self.inclusive and share in (self.lowest, self.highest))

    def _solved(self, score: Score) -> bool:
        return score.success if score.success is not None else (score.reward or 0.0) > self.solved_above
