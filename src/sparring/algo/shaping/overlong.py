"""DAPO's soft punishment of overlong rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sparring.algo.shaping.amounts import sampled_tokens, shaped
from sparring.algo.shaping.base import BaseShaping
from sparring.types import Group, Trajectory


class Overlong(BaseShaping, frozen=True, kw_only=True, tag="overlong"):
    """Soft overlong punishment: it grows linearly over the last `buffer` tokens before the limit.

        r' = r + weight * p
        p  =  0                                 for l <= limit - buffer
             (limit - buffer - l) / buffer      for limit - buffer < l <= limit
             -1                                 for l > limit

    Yu et al. (DAPO), arXiv 2503.14476, equation 13; l is the number of tokens that the role sampled. Use it if rollouts
    are cut at the limit, so that the reward does not drop all at once at a single token.
    """

    limit: int | None = None
    """Limit in tokens; None takes the task's own (`max_tokens`)."""

    buffer: int = 256
    """Number of tokens before the limit over which the punishment grows; at most the limit."""

    weight: float = 1.0
    """Punishment at the limit."""

    def __post_init__(self) -> None:
        if self.buffer < 1 or (self.limit is not None and self.limit < self.buffer):
            raise ValueError(f"buffer must be at least 1 and at most limit, got {self.buffer} and {self.limit}")

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Add the punishment to rewards; the part `overlong` of a score records the change."""
        limits = [self.limit or group.task.limits.max_tokens for group in groups]
        return [
            shaped(group, "overlong", partial(self._amounts, limit))
            for group, limit in zip(groups, limits, strict=True)
        ]

    def _amounts(self, limit: int, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
        buffer = min(self.buffer, limit)
        over = [(limit - buffer - sampled_tokens(t)) / buffer for t in trajectories]
        return [self.weight * max(-1.0, min(0.0, share)) for share in over]
