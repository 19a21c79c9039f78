"""Linear length penalty: a price per token or turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from sparring.algo.shaping.amounts import sampled_tokens, sampled_turns, shaped
from sparring.algo.shaping.base import BaseShaping
from sparring.types import Group, Trajectory


class LinearLength(BaseShaping, frozen=True, kw_only=True, tag="linear_length"):
    """Linear length penalty: a price per token or turn, scaled by the task's share of success.

        r' = r - price * max(0, l - free) * s
        s  = share of the role's members with a reward above solved_above, or 1

    l is the number of tokens or turns that the role sampled. Use it to make a policy that already succeeds cheaper.
    With the share of success as a factor, it does not teach the policy to give up early on tasks that still fail.
    """

    price: float
    """Penalty per token or turn."""

    per: Literal["token", "turn"] = "token"
    """Unit of the price."""

    free: int = 0
    """Number of units without a price."""

    by_success: bool = True
    """Multiply the penalty by the share of members that succeeded."""

    solved_above: float = 0.5
    """Reward above which a member succeeded."""

    def __post_init__(self) -> None:
        if self.price < 0 or not math.isfinite(self.price) or self.free < 0:
            raise ValueError(f"price and free must be at least 0, got {self.price} and {self.free}")

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Subtract the penalty from rewards; the part `linear_length` of a score records the change."""
        return [shaped(group, "linear_length", self._amounts) for group in groups]

    def _amounts(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
        count = sampled_tokens if self.per == "token" else sampled_turns
        share = sum(reward > self.solved_above for reward in rewards) / len(rewards) if self.by_success else 1.0
        return [-self.price * max(0, count(t) - self.free) * share for t in trajectories]
