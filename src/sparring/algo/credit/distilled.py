"""The credit of distillation: no reward is asked; what the policy sampled is handed from the policy term to the distill term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from sparring.types import Group, Sample

Aggregation = Literal["token_mean", "sequence_mean"]


class Distilled:
    """Weights of the distill term: 1 per sampled token (`token_mean`), or 1 / (sampled tokens of the trajectory)
    (`sequence_mean`). Every row stays, whatever its reward."""

    def __init__(self, aggregation: Aggregation = "token_mean") -> None:
        self._aggregation = aggregation

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Move the weights of every group's rows."""
        return [self._group(rows) for rows in samples]

    def _group(self, rows: Sequence[Sample]) -> list[Sample]:
        lengths: Counter[str] = Counter()
        for row in rows:
            lengths[_trajectory(row)] += len(row.tokens) - row.weights["policy"].count(0.0)
        return [self._sample(row, lengths[_trajectory(row)]) for row in rows]

    def _sample(self, row: Sample, length: int) -> Sample:
        others = {term: values for term, values in row.weights.items() if term != "policy"}
        share = 1.0 if self._aggregation == "token_mean" else 1.0 / length
        return replace(row, weights={**others, "distill": tuple(share * weight for weight in row.weights["policy"])})


def _trajectory(row: Sample) -> str:
    """The trajectory a sample was flattened from: its id is `<trajectory id>#<branch>`."""
    return row.id.rpartition("#")[0]
