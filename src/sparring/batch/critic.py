"""Credited rows -> rows of a critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.annotations import Annotation
from sparring.errors import SparringError
from sparring.types import Sample

NEEDS = (Annotation.VALUE, Annotation.RETURN)
"""Annotations that credit leaves on a row for the critic."""


def value_rows(rows: Sequence[Sample]) -> list[Sample]:
    """Return the rows for the value term: every token that the policy term weighs has weight 1, whatever its advantage,
    so that the critic's loss is a mean over all steps of the rollouts that stay in the update.

    What is predicted at a token is the value of the text before it, which is the state in which the token was sampled;
    what belongs to sampling (log-probabilities, kept sets, biases) stays behind.

    Raises:
        SparringError: a row lacks an annotation out of `NEEDS`.
    """
    return [_row(row) for row in rows if any(row.weights.get("policy", ()))]


def _row(row: Sample) -> Sample:
    missing = [name for name in NEEDS if name not in row.annotations]
    if missing:
        raise SparringError(
            f"sample {row.id}: expected the annotation '{missing[0]}' for the critic, got none; use credit gae"
        )
    return Sample(
        id=row.id,
        group=row.group,
        source=row.source,
        tokens=row.tokens,
        weights={"value": tuple([float(weight != 0) for weight in row.weights["policy"]])},
        annotations={name: row.annotations[name] for name in NEEDS},
    )


def without_advantage(rows: Sequence[Sample]) -> list[Sample]:
    """Return the rows with advantages of 0, for updates in which the critic warms up and the policy learns nothing."""
    return [replace(row, advantages=(0.0,) * len(row.tokens)) for row in rows]
