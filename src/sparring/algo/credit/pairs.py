"""Preference pairs from a policy's own rollouts: the best of a group against the worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.types import PAIR_SHARE, Group, Sample, alike


class Pairs:
    """Credit for online preference optimisation: online DPO (Guo et al., arXiv 2402.04792), with the best and the worst
    of a group as the pair (Dong et al., arXiv 2405.07863, section 3.2). Implements `Credit`.

    The rollout with the highest reward is chosen, the one with the lowest rejected; ties go to the earlier. All
    branches of a rollout belong to its side of the pair. Rows of other rollouts get label 0 and are not trained. A
    group leaves the update if its rewards are equal, or its best or worst rollout has no trained token.
    """

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Return rows with weights in the preference term instead of the policy term; refuse rewards that are not
        finite (`ValueError`)."""
        return [self._pair_rows(group, rows) for group, rows in zip(groups, samples, strict=True)]

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        return None

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""

    def _pair_rows(self, group: Group, rows: Sequence[Sample]) -> list[Sample]:
        rewards = [math.nan if score.reward is None else score.reward for score in group.scores]
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"group {group.id}: expected finite rewards, got {rewards}")
        if alike(rewards):
            return []
        owner = {t.id: number for number, rollout in enumerate(group.rollouts) for t in rollout.trajectories}
        sides: Mapping[int, float] = {rewards.index(max(rewards)): 1.0, rewards.index(min(rewards)): -1.0}
        of_row = [owner[row.trajectory] for row in rows]
        lengths = dict.fromkeys(range(len(rewards)), 0)
        for row, number in zip(rows, of_row, strict=True):
            lengths[number] += len(row.tokens) - row.weights["policy"].count(0.0)
        if not all(lengths[number] for number in sides):
            return []  # a rollout without tokens cannot be compared
        return [
            _with_label(row, sides.get(number, 0.0), PAIR_SHARE / lengths[number])
            for row, number in zip(rows, of_row, strict=True)
        ]


def _with_label(row: Sample, label: float, weight: float) -> Sample:
    others = {term: values for term, values in row.weights.items() if term != "policy"}
    shares = tuple(weight if value else 0.0 for value in row.weights["policy"])
    return replace(row, weights={**others, "preference": shares}, label=label)
