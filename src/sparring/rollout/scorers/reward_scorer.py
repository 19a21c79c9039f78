"""A reward model scores what the policy said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.envs.executor import cooperative
from sparring.protocols import ValueModel
from sparring.types import Rollout, Score, Task

PART = "reward_model"
"""The name of its part of a score."""


class RewardScorer:
    """Implements `Scorer`: adds what a reward model says of the whole conversation, in the very tokens that were
    sampled, to the reward of the world; a world without one leaves it to the model alone.

    A conversation is the branch of the agent's last reply, in the rollout's first role. The model is asked once for a
    whole group.

    Args:
        model: what says it; its tokenizer is the policy's.
        weight: what its rewards are multiplied with.
    """

    def __init__(self, model: ValueModel, *, weight: float = 1.0) -> None:
        self._model, self._weight = model, weight

    @cooperative
    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Score]:
        """Return the scores with the model's values added. The part `reward_model` is the value before the weight.

        Raises:
            EngineError: the model failed.
        """
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
