"""Group relative advantages: a rollout is judged against its siblings on the same task."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sparring.algo.config import GrpoConfig
from sparring.types import Group, Sample


class Grpo:
    """GRPO's outcome supervision (arXiv 2402.03300, section 4.1.2): one advantage for all sampled tokens of a rollout.

    With rewards r_1 .. r_G of a group:

        standard       A_i = (r_i - mean(r)) / (std(r) + epsilon)      std over G - 1, as in the common implementations
        unnormalised   A_i =  r_i - mean(r)                            Dr. GRPO (arXiv 2503.20783, section 3.2)

    The aggregation is written into the policy weights, so that a loss is always sum(weight * term) / sum(weight):

        token_mean     weight 1 per token                              DAPO (arXiv 2503.14476, equation 8)
        sequence_mean  weight 1 / (sampled tokens of the trajectory)   GRPO (arXiv 2402.03300, equation 3)
    """

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages and weights. A group without variance gives an empty list under `zero_variance_filter`.

        Raises:
            ValueError: a sample belongs to no trajectory of its group, or a reward is not finite.
        """
        return [self._group(group, rows) for group, rows in zip(groups, samples, strict=True)]

    def _group(self, group: Group, rows: Sequence[Sample]) -> list[Sample]:
        rewards = [_reward(score.reward, group.id) for score in group.scores]
        if self._config.zero_variance_filter and len(set(rewards)) <= 1:
            return []
        advantages = {
            trajectory.id: advantage
            for rollout, advantage in zip(group.rollouts, self._advantages(rewards), strict=True)
            for trajectory in rollout.trajectories
        }
        lengths: Counter[str] = Counter()
        for row in rows:
            if (trajectory := _trajectory(row)) not in advantages:
                raise ValueError(f"group {group.id}: sample {row.id} belongs to none of its trajectories")
            lengths[trajectory] += len(row.tokens) - row.weights["policy"].count(0.0)
        return [self._sample(row, advantages[_trajectory(row)], lengths[_trajectory(row)]) for row in rows]

    def _advantages(self, rewards: Sequence[float]) -> list[float]:
        if len(set(rewards)) <= 1:  # exactly zero, which a rounded mean would miss
            return [0.0] * len(rewards)
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if self._config.advantage == "unnormalised":
            return centred
        deviation = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
        return [c / (deviation + self._config.epsilon) for c in centred]

    def _sample(self, row: Sample, advantage: float, length: int) -> Sample:
        weights = row.weights["policy"]
        if self._config.aggregation == "sequence_mean":
            weights = tuple(weight / length for weight in weights)
        advantages = tuple([advantage if weight else 0.0 for weight in weights])
        return replace(row, weights={**row.weights, "policy": weights}, advantages=advantages)


def _reward(reward: float | None, group: str) -> float:
    if reward is None or not math.isfinite(reward):
        raise ValueError(f"group {group}: reward {reward} is not a finite number")
    return reward


def _trajectory(row: Sample) -> str:
    """The trajectory a sample was flattened from: its id is `<trajectory id>#<branch>`."""
    return row.id.rpartition("#")[0]
