"""Scorer of whole conversations by a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.envs.executor import cooperative
from sparring.protocols import ValueModel
from sparring.types import Rollout, Score, Task

PART = "reward_model"
"""Name of the reward model's part in a score."""


class RewardScorer:
    """Scorer that adds the value of a reward model to the world's reward, if the world gives one. The model reads the
    sampled tokens themselves. Implements `Scorer`.

    The scored conversation is the branch of the agent's last reply, in the rollout's first role. The model is called
    once for a whole group.

    Args:
        model: reward model with the policy's tokenizer.
    """

    def __init__(self, model: ValueModel, *, weight: float = 1.0) -> None:
        self._model, self._weight = model, weight

    @cooperative
    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Score]:
        """Return the scores with the model's values added. The part `reward_model` is the value before the weight."""
        texts = [_text(rollout) for rollout in rollouts]
        values = await self._model.values(texts)
        return [
            replace(score, reward=(score.reward or 0.0) + self._weight * value, parts={**score.parts, PART: value})
            for score, value in zip(scores, values, strict=True)
        ]


def _text(rollout: Rollout) -> tuple[int, ...]:
    trajectory = rollout.trajectories[0]
    answer = trajectory.answer
    branch = list(trajectory.branches())[-1] if answer is None else trajectory.path(answer.index)
    return tuple(token for segment in branch for token in segment.tokens)
