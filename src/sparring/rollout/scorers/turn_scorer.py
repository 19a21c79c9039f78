"""Scorer of single turns, or of steps inside turns, by a process reward model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sparring.envs.executor import cooperative
from sparring.errors import refusal
from sparring.protocols import ValueModel
from sparring.rollout.scorers.reward_scorer import PART
from sparring.types import Rollout, Score, Task

Probabilities = Sequence[Mapping[int, float]]
"""For each turn, the probability that it is right so far, by the number of its tokens that the model has read."""


class TurnScorer:
    """Scorer that rewards each turn of the policy with the probability that it is right. The model reads the sampled
    tokens themselves. Implements `Scorer`.

        p_k         = sigmoid(v_k)                         v_k: the model's value at the last token of turn k
        per_turn_k += weight * p_k                         the process reward (Lightman et al., arXiv 2305.20050)
        reward     += weight * (p_1 + ... + p_K)           so that reward minus sum of per_turn is the world's

    A turn is the reply to one request of an agent, in the context that it was sampled in. Turns are in the order of
    `Score.per_turn`. If turns have steps, each step is scored at its own end, `per_step` has its reward, and the turn's
    reward is their sum. The last step includes the rest of its turn. The model is called once for a whole group, and
    computes common prefixes once.

    Args:
        model: scalar head that was trained on labelled turns or steps, with the policy's tokenizer.
        steps: returns the number of a turn's tokens up to the end of each step; None scores a turn as a whole.
    """

    def __init__(
        self, model: ValueModel, *, weight: float = 1.0, steps: Callable[[Sequence[int]], Sequence[int]] | None = None
    ) -> None:
        self._model, self._weight, self._steps = model, weight, steps

    @cooperative
    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[Score]:
        """Return the scores with rewards of turns. The part `reward_model` is the mean probability before the weight.
        Raises BadInput if a rollout has several roles, or the world's score has rewards of another number of turns."""
        turns = [list(_turns(rollout)) for rollout in rollouts]
        ends = [[[len(turn)] if self._steps is None else self._steps(turn) for _, turn in of] for of in turns]
        prefixes = [
            (*before, *turn[:end])
            for of, of_ends in zip(turns, ends, strict=True)
            for (before, turn), at in zip(of, of_ends, strict=True)
            for end in at
        ]
        values = iter(await self._model.values(prefixes))
        probabilities = [[{end: _sigmoid(next(values)) for end in at} for at in of] for of in ends]
        lengths = [[len(turn) for _, turn in of] for of in turns]
        return [self._add_rewards(*parts) for parts in zip(rollouts, scores, probabilities, lengths, strict=True)]

    def _add_rewards(
        self, rollout: Rollout, score: Score, probabilities: Probabilities, lengths: Sequence[int]
    ) -> Score:
        own = [0.0] * len(probabilities) if score.per_turn is None else score.per_turn
        if len(own) != len(probabilities):
            expected = f"rewards of {len(probabilities)} turns, as many as were sampled"
            raise refusal(f"rollout {rollout.id}", expected, str(len(own)), "correct the environment's score")
        earned = [self._weight * math.fsum(turn.values()) for turn in probabilities]
        every = [probability for turn in probabilities for probability in turn.values()]
        with_turns = replace(
            score,
            reward=(score.reward or 0.0) + math.fsum(earned),
            per_turn=tuple(before + more for before, more in zip(own, earned, strict=True)),
            parts={**score.parts, PART: math.fsum(every) / len(every)} if every else score.parts,
        )
        if self._steps is None:
            return with_turns
        steps_before = score.per_step or ((),) * len(probabilities)
        steps = zip(steps_before, probabilities, lengths, strict=True)
        return replace(
            with_turns, per_step=tuple(self._step_rewards(dict(before), turn, length) for before, turn, length in steps)
        )

    def _step_rewards(
        self, earned: dict[int, float], probabilities: Mapping[int, float], length: int
    ) -> tuple[tuple[int, float], ...]:
        """Return the rewards of a turn's steps, with the model's rewards added. The model's last reward is put at the
        turn's end."""
        for end, probability in probabilities.items():
            place = length if end == max(probabilities) else end
            earned[place] = earned.get(place, 0.0) + self._weight * probability
        return tuple(sorted(earned.items()))


def _turns(rollout: Rollout) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if len(rollout.trajectories) > 1:
        roles = ", ".join(trajectory.role for trajectory in rollout.trajectories)
        raise refusal("rl.reward_by", "a world of one role with 'turn' or 'step'", roles, "set it to 'reply'")
    read: dict[int | None, tuple[int, ...]] = {None: ()}
    for segment in rollout.trajectories[0].segments:
        read[segment.index] = read[segment.parent] + segment.tokens
        if segment.is_turn:
            yield read[segment.parent], segment.tokens


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
