"""TOPR: signed rewards, for a gate that treats successes and failures differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, per_trajectory
from sparring.algo.facts import Facts
from sparring.types import Group, Sample


class Topr(BaseCredit, frozen=True, kw_only=True, tag="topr"):
    """TOPR's signed reward: above a constant a rollout is imitated, below it is pushed away.

        A_i = r_i - baseline

    Le Roux et al., arXiv 2503.14286, equations 7 and 8. The other half is a gate: no ratio where A is positive, a
    sequence ratio clipped to [0, 1] where it is negative. Use it with that gate on data that is far off policy. The
    baseline says how much failures weigh against successes: 0 for rewards of -1 and 1, 0.5 for 0 and 1.
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2503.14286, equations 7 and 8",
        defaults={"baseline": "the paper's rewards are 1 and -1"},
        differences=(),
    )

    least_members: ClassVar[int] = 1
    sees_one_group: ClassVar[bool] = True

    baseline: float = 0.0
    """Subtracted from every reward."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages; see `protocols.Credit`."""
        return per_trajectory(groups, samples, self._advantages)

    def _advantages(self, members: Sequence[Member]) -> list[float]:
        return [m.reward - self.baseline for m in members]
