"""Weights by the inverse of survival: what the infrastructure lost is stood for by what is like it (law 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.observe.survival import Survival, lost_rollouts, stages
from sparring.types import Group, Sample

FADE = 0.95
"""With every update, what was counted in those before counts this share of what it did."""


class InverseSurvival:
    """Policy weights of every rollout times 1 / G, G the probability that the infrastructure lets it come to its end.

    Of an environment with n rollouts left of N that were admitted to an update, a rollout's weights are times

        (n / N) / G

    whose mean over what is left is 1 in expectation, so that an update is as large as before and environments keep
    their shares. Summed over what is left, what a rollout adds to the gradient then has the expectation that it would
    have if nothing was lost (inverse probability of censoring weights, Robins and Rotnitzky 1992), if losses hang on
    the turn and on whether it calls tools. G is `observe.survival`'s, of the latest updates.
    """

    def __init__(self) -> None:
        self._survival = Survival()

    def weighted(self, groups: Sequence[Group], credited: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Return the rows of an update with their weights in the policy term changed.

        Args:
            groups: of the update.
            credited: the rows of each; none of a group that leaves the update.
        """
        self._survival.fade(FADE)
        left, admitted = Counter[str](), Counter[str]()
        for group, rows in zip(groups, credited, strict=True):
            self._survival.add(group)
            if rows:
                left[group.task.env] += len(group.rollouts)
                admitted[group.task.env] += len(group.rollouts) + len(lost_rollouts(group))
        return [self._of_group(group, rows, left, admitted) for group, rows in zip(groups, credited, strict=True)]

    def state(self) -> Mapping[str, Any]:
        """Return the counts of rollouts by environment and stage."""
        counts = self._survival.counts
        return {env: [[*stage, *counted] for stage, counted in counts[env].items()] for env in counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._survival = Survival()
        for env, cells in state.items():
            for turn, calls, reached, lost in cells:
                self._survival.counts[env][turn, calls] = [reached, lost]

    def _of_group(
        self, group: Group, rows: Sequence[Sample], left: Mapping[str, int], admitted: Mapping[str, int]
    ) -> list[Sample]:
        if not rows:
            return []
        env = group.task.env
        share = left[env] / admitted[env]
        factors = {
            trajectory.id: share / self._survival.of(env, stages(rollout))
            for rollout in group.rollouts
            for trajectory in rollout.trajectories
        }
        return [_times(row, factors[row.trajectory]) for row in rows]


def _times(row: Sample, factor: float) -> Sample:
    """Return a row whose weights in the policy term are times `factor`."""
    if factor == 1.0 or "policy" not in row.weights:
        return row
    weights = tuple([factor * weight for weight in row.weights["policy"]])
    return replace(row, weights={**row.weights, "policy": weights})
