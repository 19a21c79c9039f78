"""Credited rows of the policy -> rows of a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.annotations import Annotation
from sparring.batch.annotations import required
from sparring.types import Sample

NEEDS = (Annotation.VALUE, Annotation.RETURN)
"""Annotations that the critic reads, written by credit."""


def value_rows(rows: Sequence[Sample]) -> list[Sample]:
    """Return the rows for the value term: weight 1 at every token with policy weight, whatever its advantage.

    The critic's loss is thus a mean over all steps of the rollouts in the update. The value at a token belongs to the
    context before it, the state in which the token was sampled. Sampling data (log-probabilities, kept sets, biases) is
    not copied. Raises SparringError for a row without an annotation of `NEEDS`.
    """
    return [_row(row) for row in rows if any(row.weights.get("policy", ()))]


def _row(row: Sample) -> Sample:
    required(row, NEEDS, "critic", "gae")
    return Sample(
        id=row.id,
        group=row.group,
        source=row.source,
        tokens=row.tokens,
        weights={"value": tuple([float(weight != 0) for weight in row.weights["policy"]])},
        annotations={name: row.annotations[name] for name in NEEDS},
    )


def without_advantage(rows: Sequence[Sample]) -> list[Sample]:
    """Set all advantages to 0, for updates in which only the critic learns."""
    return [replace(row, advantages=(0.0,) * len(row.tokens)) for row in rows]
