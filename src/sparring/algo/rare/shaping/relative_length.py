"""Kimi's length reward: shorter than the sibling rollouts is better."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.algo.shaping.amounts import sampled_tokens, shaped
from sparring.algo.shaping.base import BaseShaping
from sparring.types import Group, Trajectory


class RelativeLength(BaseShaping, frozen=True, kw_only=True, tag="relative_length"):
    """Relative length reward: among the rollouts of a task, short successes gain and long ones lose.

        x_i = 0.5 - (l_i - min(l)) / (max(l) - min(l))      0 if all lengths are equal
        r'  = r + weight * x_i             for r > solved_above
              r + weight * min(0, x_i)     otherwise

    Kimi team (k1.5), arXiv 2501.12599, section 2.3.3; l is the number of tokens that the role sampled. Use it after a
    warm-up, against overthinking.
    """

    weight: float = 1.0
    """Weight of the length reward."""

    solved_above: float = 0.5
    """Reward above which a member succeeded."""

    def shape(self, groups: Sequence[Group]) -> list[Group]:
        """Add the length reward; the part `relative_length` of a score records the change."""
        return [shaped(group, "relative_length", self._amounts) for group in groups]

    def _amounts(self, trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> list[float]:
        lengths = [sampled_tokens(t) for t in trajectories]
        shortest, spread = min(lengths), max(lengths) - min(lengths)
        if not spread:
            return [0.0] * len(lengths)
        places = [0.5 - (length - shortest) / spread for length in lengths]
        solved = [reward > self.solved_above for reward in rewards]
        return [self.weight * (x if right else min(0.0, x)) for x, right in zip(places, solved, strict=True)]
