"""DAPO's soft punishment of overlong rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from sparring.algo.facts import Facts
from sparring.algo.shaping.amounts import sampled_tokens, shaped
from sparring.algo.shaping.base import BaseShaping
from sparring.types import Group, Trajectory


class Overlong(BaseShaping, frozen=True, kw_only=True, tag="overlong"):
    """Soft overlong punishment: the last `buffer` tokens before the limit cost more and more.

        r' = r + weight * p
        p  =  0                                 where l <= limit - buffer
             (limit - buffer - l) / buffer      where limit - buffer < l <= limit
             -1                                 where l > limit

    Yu et al. (DAPO), arXiv 2503.14476, equation 13; l: tokens that the role sampled. Use it where rollouts are cut at
    the limit, so that a sound one that is merely long does not lose everything at one token.
    """

    facts: ClassVar[Facts] = Facts(
        source="arXiv 2503.14476, equation 13",
        defaults={
            "limit": "the task's own limit",
            "buffer": "ours; the paper's 4,096 are for answers of 20,480 tokens",
            "weight": "the paper",
        },
        differences=(),
    )

    limit: int | None = None
    """Tokens; None is the task's own limit (`max_tokens`)."""

    buffer: int = 256
    """Tokens before the limit over which the punishment grows; no more than the limit itself."""

    weight: float = 1.0
    """The punishment at the limit."""

    def __post_init__(self) -> None:
        if self.buffer < 1 or (self.limit is not None and self.limit < self.buffer):
            raise ValueError(f"buffer must be at least 1 and at most limit, got {self.buffer} and {self.limit}")

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with punished rewards; the part `overlong` of a score says by how much."""
        limits = [self.limit or group.task.limits.max_tokens for group in groups]
        return [
            shaped(group, "overlong", partial(self._amounts, limit))
            for group, limit in zip(groups, limits, strict=True)
        ]

    def _amounts(self, limit: int, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
        buffer = min(self.buffer, limit)
        over = [(limit - buffer - sampled_tokens(t)) / buffer for t in trajectories]
        return [self.weight * max(-1.0, min(0.0, share)) for share in over]
