"""A process reward model scores every turn of the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from sparring.errors import refusal
from sparring.protocols import Worth
from sparring.rollout.reward_scorer import PART
from sparring.types import Rollout, Score, Task


class TurnScorer:
    """Implements `Scorer`: says how likely each turn of the policy is right, in the very tokens that were sampled.

        p_k         = sigmoid(v_k)                         v_k: the model's value behind the last token of turn k
        per_turn_k += weight * p_k                         the process reward (Lightman et al., arXiv 2305.20050)
        reward     += weight * (p_1 + ... + p_K)           so that turns leave of it what the world gave

    A turn is what one request sampled, in the context that it was sampled in; the order is that of `Score.per_turn`. The model is
    asked once for a whole group, and what turns begin with in common is computed once.

    Args:
        model: a scalar head that was trained on labelled turns or steps; its tokenizer is the policy's.
        weight: what the probabilities are multiplied with.
    """

    def __init__(self, model: Worth, *, weight: float = 1.0) -> None:
        self._model, self._weight = model, weight

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Score]:
        """The scores with rewards of turns, and the mean probability, before the weight, as the part `reward_model`.

        Raises:
            BadInput: a rollout has several roles, whose turns no score tells apart; or the world says what other turns earned.
            EngineError: the model failed.
        """
        texts = [list(_turns(rollout)) for rollout in rollouts]
        values = iter(await self._model.worth([text for of in texts for text in of]))
        found = [[_sigmoid(value) for value in islice(values, len(of))] for of in texts]
        return [self._with(*each) for each in zip(rollouts, scores, found, strict=True)]

    def _with(self, rollout: Rollout, score: Score, found: Sequence[float]) -> Score:
        earned = [self._weight * probability for probability in found]
        own = [0.0] * len(found) if score.per_turn is None else score.per_turn
        if len(own) != len(found):
            expected = f"rewards of {len(found)} turns, as many as were sampled"
            raise refusal(f"rollout {rollout.id}", expected, str(len(own)), "correct the environment's score")
        per_turn = [given + more for given, more in zip(own, earned, strict=True)]
        parts = {**score.parts, PART: math.fsum(found) / len(found)} if found else score.parts
        return replace(score, reward=(score.reward or 0.0) + math.fsum(earned), per_turn=tuple(per_turn), parts=parts)


def _turns(rollout: Rollout) -> Iterator[tuple[int, ...]]:
    """What had been said by the end of each turn."""
    if len(rollout.trajectories) > 1:
        roles = ", ".join(trajectory.role for trajectory in rollout.trajectories)
        raise refusal("rl.reward_by", "a world of one role with 'turn'", roles, "set it to 'reply'")
    read: dict[int | None, tuple[int, ...]] = {None: ()}
    for segment in rollout.trajectories[0].segments:
        read[segment.index] = read[segment.parent] + segment.tokens
        if segment.model is not None and segment.tokens:
            yield read[segment.index]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
