"""Inverse-probability-of-survival weights: surviving rollouts stand in for similar ones that the infrastructure lost
(law 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.observe.survival import Survival, lost_rollouts, stages
from sparring.types import Group, Sample

FADE = 0.95
"""Decay per update of the counts from earlier updates."""


class InverseSurvival:
    """Weights the rollouts of an update by 1 / G, where G is the probability that infrastructure failures spare the
    rollout.

    If n of the N rollouts that an environment had admitted to the update survived, a surviving rollout's weight is
    multiplied by

        (n / N) / G

    The expected mean of the factors is 1, so updates keep their size and environments their shares. The expected
    gradient is then the one without losses (inverse probability of censoring weights, Robins and Rotnitzky 1992), if
    losses depend only on the turn and on whether it calls tools. G is estimated by `observe.survival` from recent
    updates.
    """

    def __init__(self) -> None:
        self._survival = Survival()

    def weighted(self, groups: Sequence[Group], credited: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Multiply the policy weights of an update's rows by their rollouts' factors.

        Args:
            credited: credited rows of each group; empty for a group that leaves the update.
        """
        self._survival.fade(FADE)
        survivors, admitted = Counter[str](), Counter[str]()
        for group, rows in zip(groups, credited, strict=True):
            self._survival.add(group)
            if rows:
                survivors[group.task.env] += len(group.rollouts)
                admitted[group.task.env] += len(group.rollouts) + len(lost_rollouts(group))
        return [
            self._weight_group(group, rows, survivors, admitted) for group, rows in zip(groups, credited, strict=True)
        ]

    def state(self) -> Mapping[str, Any]:
        """Return, by environment and stage, the numbers of rollouts that reached the stage and of those lost at it."""
        counts = self._survival.counts
        return {env: [[*stage, *counted] for stage, counted in counts[env].items()] for env in counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counts that `state` returned."""
        self._survival = Survival()
        for env, cells in state.items():
            for turn, calls, reached, lost in cells:
                self._survival.counts[env][turn, calls] = [reached, lost]

    def _weight_group(
        self, group: Group, rows: Sequence[Sample], survivors: Mapping[str, int], admitted: Mapping[str, int]
    ) -> list[Sample]:
        if not rows:
            return []
        env = group.task.env
        share = survivors[env] / admitted[env]
        factors = {
            trajectory.id: share / self._survival.of(env, stages(rollout))
            for rollout in group.rollouts
            for trajectory in rollout.trajectories
        }
        return [_scale_policy_weights(row, factors[row.trajectory]) for row in rows]


def _scale_policy_weights(row: Sample, factor: float) -> Sample:
    if factor == 1.0 or "policy" not in row.weights:
        return row
    weights = tuple([factor * weight for weight in row.weights["policy"]])
    return replace(row, weights={**row.weights, "policy": weights})
