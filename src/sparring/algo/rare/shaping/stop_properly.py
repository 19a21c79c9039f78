"""Reduced reward for rollouts that a limit cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sparring.algo.shaping.amounts import shaped
from sparring.algo.shaping.base import BaseShaping
from sparring.errors import refusal
from sparring.types import Group, Trajectory


class StopProperly(BaseShaping, frozen=True, kw_only=True, tag="stop_properly"):
    """Stop properly: a truncated rollout keeps only a share of its reward.

        r' = keeps * r     if the role's outcome is truncated

    The penalty of ProRL's recipe (arXiv 2505.24864 describes the first version). Use it if truncated rollouts are
    scored; `overlong` is the gentler choice. Rewards below 0 are refused, because a share of a negative reward is
    larger, so truncation would pay. The rule therefore precedes every other shaping.
    """

    needs_nonnegative_rewards: ClassVar[bool] = True

    keeps: float = 0.0
    """Share of the reward that a truncated rollout keeps."""

    def __post_init__(self) -> None:
        if not 0 <= self.keeps <= 1:
            raise ValueError(f"keeps must lie between 0 and 1, got {self.keeps}")

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Reduce the rewards of truncated rollouts; the part `stop_properly` of a score records the change. A reward
        below 0 is refused (`BadInput`)."""
        return [shaped(group, "stop_properly", self._amounts) for group in groups]

    def _amounts(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            if reward < 0:
                expected = "rewards of at least 0, of which a truncated rollout keeps a share"
                fix = "choose the shaping 'overlong', or let the environment give no negative reward"
                raise refusal("algo.shaping stop_properly", expected, f"{reward} for {trajectory.id}", fix)
        cut = [t.outcome.kind == "truncated" for t in trajectories]
        return [(self.keeps - 1) * reward if short else 0.0 for short, reward in zip(cut, rewards, strict=True)]
