"""Scaling of rewards, for environments that reward in different units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparring.types import Rollout, Score, Task


class RewardScale:
    """Scorer that multiplies the rewards of each environment by a factor. Implements `protocols.Scorer`; the last of a
    group's scorers.

    Args:
        scales: factor of each environment, by its name; other environments have the factor 1.
    """

    def __init__(self, scales: Mapping[str, float]) -> None:
        self._scales = dict(scales)

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """Return the scaled scores: reward, rewards of turns and steps, and rewards of roles. Named parts are not
        scaled."""
        scale = self._scales.get(task.env, 1.0)
        return scores if scale == 1.0 else [_scaled(score, scale) for score in scores]


def _scaled(score: Score, scale: float) -> Score:
    of_turns = score.per_role_turns
    return replace(
        score,
        reward=None if score.reward is None else scale * score.reward,
        per_turn=_times(score.per_turn, scale),
        per_step=None
        if score.per_step is None
        else tuple(tuple((end, scale * reward) for end, reward in turn) for turn in score.per_step),
        per_role=None if score.per_role is None else {role: scale * value for role, value in score.per_role.items()},
        per_role_turns=None
        if of_turns is None
        else {role: tuple(scale * value for value in values) for role, values in of_turns.items()},
    )


def _times(values: tuple[float, ...] | None, scale: float) -> tuple[float, ...] | None:
    return None if values is None else tuple(scale * value for value in values)
