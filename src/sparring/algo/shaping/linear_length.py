"""A price per token or turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from sparring.algo.facts import Facts
from sparring.algo.shaping.amounts import sampled_tokens, sampled_turns, shaped
from sparring.algo.shaping.base import BaseShaping
from sparring.types import Group, Trajectory


class LinearLength(BaseShaping, frozen=True, kw_only=True, tag="linear_length"):
    """Linear length penalty: what a rollout used has a price, in full only where the task is mastered.

        r' = r - price * max(0, l - free) * s
        s  = share of the role's members with a reward above solved_above, or 1

    l: tokens or turns that the role sampled. Use it to make a policy that already succeeds cheaper: with the share of
        success
    as a factor, tasks that still fail are not taught to give up early.
    """

    facts: ClassVar[Facts] = Facts(
        source="ours",
        defaults={
            "per": "ours",
            "free": "off",
            "by_success": "ours",
            "solved_above": "ours: between a failure's 0 and a success's 1",
        },
        differences=(),
    )

    price: float
    """Reward per unit."""

    per: Literal["token", "turn"] = "token"
    """The unit."""

    free: int = 0
    """Units that cost nothing."""

    by_success: bool = True
    """Multiply with the share of members that succeeded."""

    solved_above: float = 0.5
    """A member succeeded when its reward is above this."""

    def __post_init__(self) -> None:
        if self.price < 0 or not math.isfinite(self.price) or self.free < 0:
            raise ValueError(f"price and free must be at least 0, got {self.price} and {self.free}")

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with rewards less the price; the part `linear_length` of a score says by how much."""
        return [shaped(group, "linear_length", self._amounts) for group in groups]

    def _amounts(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
        count = sampled_tokens if self.per == "token" else sampled_turns
        share = sum(reward > self.solved_above for reward in rewards) / len(rewards) if self.by_success else 1.0
        return [-self.price * max(0, count(t) - self.free) * share for t in trajectories]
