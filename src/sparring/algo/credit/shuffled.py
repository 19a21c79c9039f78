"""Control experiment: training on permuted rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash

from sparring.protocols import Credit
from sparring.types import Group, Sample, Score


class Shuffled:
    """Credit on permuted scores, over all rollouts of all groups of an update.

    Rewards then carry no information, so a run that still improves has a leak. The permutation depends only on the seed
    and on the update's first admission number, so a resumed run shuffles the same way. States of turns stay in place;
    rewards of turns move to the end. Implements `Credit`.
    """

    def __init__(self, credit: Credit, *, seed: int) -> None:
        self._credit = credit
        self._seed = seed

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]:
        scores = [score for group in groups for score in group.scores]
        order = sorted(range(len(scores)), key=lambda number: self._sort_key(groups[0].index, number))
        permuted = iter([scores[number] for number in order])
        shuffled = [
            replace(group, scores=tuple(_fit_score(own, next(permuted)) for own in group.scores)) for group in groups
        ]
        return self._credit.credit(shuffled, samples)

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        return self._credit.denominator(rows)

    def state(self) -> Mapping[str, Any]:
        return self._credit.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._credit.restore(state)

    def _sort_key(self, update: int, number: int) -> int:
        return xxhash.xxh3_64_intdigest(f"shuffled/{self._seed}/{update}/{number}".encode())


def _fit_score(own: Score, other: Score) -> Score:
    """Fit the score `other` to the turns of the rollout with the score `own`: that rollout keeps its states, and the
    rewards of turns in `other` move to the end."""
    turns = None if own.per_turn is None else (0.0,) * len(own.per_turn)
    of_roles = own.per_role_turns
    return replace(
        other,
        states=own.states,
        per_turn=turns,
        per_step=None,
        per_role_turns=None if of_roles is None else {role: (0.0,) * len(of_roles[role]) for role in of_roles},
        per_role_states=own.per_role_states,
    )
