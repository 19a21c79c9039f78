"""The control of an experiment: the same steps with rewards that mean nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import xxhash

from sparring.protocols import Credit
from sparring.types import Group, Sample


class Shuffled:
    """Permute the scores over all rollouts of all groups of an update, then ask the wrapped credit.

    What is learned under it is learned from nothing; a run that still improves has a leak. The permutation is a function
    of the seed and of the update's first admission number alone, so a resumed run shuffles the same way.
    """

    def __init__(self, credit: Credit, *, seed: int) -> None:
        self._credit = credit
        self._seed = seed

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]:
        """The wrapped credit's samples under permuted scores; the groups themselves stay as they are."""
        scores = [score for group in groups for score in group.scores]
        order = sorted(range(len(scores)), key=lambda place: self._key(groups[0].index, place))
        permuted = iter([scores[place] for place in order])
        shuffled = [replace(group, scores=tuple(next(permuted) for _ in group.scores)) for group in groups]
        return self._credit.credit(shuffled, samples)

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        """The wrapped credit's."""
        return self._credit.denominator(rows)

    def _key(self, update: int, place: int) -> int:
        return xxhash.xxh3_64_intdigest(f"shuffled/{self._seed}/{update}/{place}".encode())
