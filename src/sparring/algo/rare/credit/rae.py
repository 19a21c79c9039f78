"""Role-conditioned advantages: each role has a moving-average baseline of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.members import Member, members, set_advantages
from sparring.types import Group, Sample


class Rae(BaseCredit, frozen=True, kw_only=True, tag="rae"):
    """Role-conditioned advantage estimation (SPIRAL): rewards less a moving average per environment and role.

        b_role <- decay * b_role + (1 - decay) * r_i
        A_i     = r_i - b_role               = decay * (r_i - b_role before)

    Liu et al., arXiv 2506.24119, algorithm 1; members in order of admission, b starts at 0. Use it for self-play: in a
    zero-sum game the mean over roles is always 0, so a common baseline would credit the first mover's advantage for
    ever. `open` returns the rule together with its state, the averages.
    """

    least_members: ClassVar[int] = 1

    decay: float = 0.95
    """Weight of the old average when a reward arrives."""

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"decay must be above 0, where every advantage is 0, and below 1, got {self.decay}")

    def open(self) -> RaeCredit:
        return RaeCredit(self.decay)


class RaeCredit:
    """Rule `rae` with its moving averages, by environment and role. Implements `Credit`, except `denominator`."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._averages: dict[str, float] = {}

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        credited = []
        for group, rows in zip(groups, samples, strict=True):
            advantages = {}
            everyone = members(group, rows)
            for m in everyone:
                key = f"{group.task.env}/{m.trajectory.role}"
                average = self._decay * self._averages.get(key, 0.0) + (1 - self._decay) * m.reward
                self._averages[key] = average
                advantages[m.trajectory.id] = m.reward - average
            credited.append(set_advantages(rows, everyone, advantages, Member.with_advantage))
        return credited

    def state(self) -> Mapping[str, Any]:
        return {"averages": dict(self._averages)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._averages = dict(state["averages"])
