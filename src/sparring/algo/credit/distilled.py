"""Credit for distillation: sampled tokens move from the policy term to the distill term, whatever their reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sparring.algo.aggregation import aggregated
from sparring.types import Group, Sample


class Distilled:
    """Moves the policy weights to the distill term. Every row stays, whatever its reward. Implements `Credit`."""

    def __init__(self, aggregation: Literal["token_mean", "sequence_mean"] = "token_mean") -> None:
        self._aggregation = aggregation

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        return [[_to_distill_term(row) for row in aggregated(rows, self._aggregation, 1)] for rows in samples]

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        return None

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


def _to_distill_term(row: Sample) -> Sample:
    others = {term: values for term, values in row.weights.items() if term != "policy"}
    return replace(row, weights={**others, "distill": row.weights["policy"]})
