"""Language-model loss on right answers, added to the policy loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sparring.algo.base import NamedRule
from sparring.types import Group, Sample, Score


class RightAnswers(NamedRule, frozen=True, kw_only=True, tag="right_answers"):
    """VAPO's positive-example loss: right rollouts are also imitated.

        loss  = policy loss + coefficient * L_NLL
        L_NLL = - sum_i sum_t log pi(y_i,t) / sum_i T_i    over a step's right rollouts i of T_i sampled tokens

    Yue et al., arXiv 2504.05118, section 4.3. A rollout is right if the score's `success` is true. Without a `success`,
    or for a role with a reward of its own, the reward before shaping decides: it has to be above solved_above. Groups
    that a filter drops are not imitated. Use it for tasks whose right answers are rare, so that each is used more than
    once.
    """

    coefficient: float = 0.1
    """Weight of the loss; the paper's mu."""

    solved_above: float = 0.5
    """Reward above which a rollout is right."""

    def __post_init__(self) -> None:
        if not 0 < self.coefficient < math.inf:
            raise ValueError(f"coefficient must be above 0, got {self.coefficient}; leave the table out for none")

    def imitated(self, group: Group, rows: Sequence[Sample]) -> list[Sample]:
        """Set weight 1 in the imitate term on each sampled token of right trajectories; return the group's rows."""
        right = {
            trajectory.id
            for rollout, score in zip(group.rollouts, group.scores, strict=True)
            for trajectory in rollout.trajectories
            if is_right(score, trajectory.role, self.solved_above)
        }
        return [_with_imitate_weights(row) if row.trajectory in right else row for row in rows]


def is_right(score: Score, role: str, solved_above: float) -> bool:
    """Return whether a role succeeded. The score's `success` decides. For a score without `success`, and for a role
    with a reward of its own, the role's reward decides: it has to be above `solved_above`."""
    if score.success is not None and role not in (score.per_role or {}):
        return score.success
    return (score.of(role) or 0.0) > solved_above


def _with_imitate_weights(row: Sample) -> Sample:
    return replace(
        row, weights={**row.weights, "imitate": tuple([float(weight != 0) for weight in row.weights["policy"]])}
    )
