"""Group relative advantages: a rollout is judged against its siblings on the same task."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sparring.algo.aggregation import trajectory_of
from sparring.types import Group, Sample


class Grpo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="grpo", tag_field="name"):
    """GRPO's outcome supervision (arXiv 2402.03300, section 4.1.2): one advantage for all sampled tokens of a rollout.

    With rewards r_1 .. r_G of a group:

        A_i = (r_i - mean(r)) / (std(r) + epsilon)      std over G - 1, as in the common implementations
        A_i =  r_i - mean(r)                            without `normalise`: Dr. GRPO (arXiv 2503.20783, section 3.2)
    """

    normalise: bool = True
    """Whether to divide by the group's standard deviation."""

    epsilon: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages.

        Raises:
            ValueError: a sample belongs to no trajectory of its group, or a reward is not finite.
        """
        return [self._group(group, rows) for group, rows in zip(groups, samples, strict=True)]

    def _group(self, group: Group, rows: Sequence[Sample]) -> list[Sample]:
        earned: dict[str, list[float]] = defaultdict(list)  # beside the outcome, such as minus a KL penalty
        for row in rows:
            earned[trajectory_of(row)] += row.annotations.get("reward", ())
        rewards = [
            _reward(score.reward, group.id) + math.fsum(x for of in rollout.trajectories for x in earned.get(of.id, ()))
            for rollout, score in zip(group.rollouts, group.scores, strict=True)
        ]
        advantages = {
            trajectory.id: advantage
            for rollout, advantage in zip(group.rollouts, self._advantages(rewards), strict=True)
            for trajectory in rollout.trajectories
        }
        for row in rows:
            if trajectory_of(row) not in advantages:
                raise ValueError(f"group {group.id}: sample {row.id} belongs to none of its trajectories")
        return [_with(row, advantages[trajectory_of(row)]) for row in rows]

    def _advantages(self, rewards: Sequence[float]) -> list[float]:
        if len(set(rewards)) <= 1:  # exactly zero, which a rounded mean would miss
            return [0.0] * len(rewards)
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if not self.normalise:
            return centred
        deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
        return [c / (deviation + self.epsilon) for c in centred]


def _with(row: Sample, advantage: float) -> Sample:
    return replace(row, advantages=tuple([advantage if weight else 0.0 for weight in row.weights["policy"]]))


def _reward(reward: float | None, group: str) -> float:
    if reward is None or not math.isfinite(reward):
        raise ValueError(f"group {group}: reward {reward} is not a finite number")
    return reward
