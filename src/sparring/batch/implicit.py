"""Credited rows of the policy -> rows of an implicit process reward model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sparring.annotations import Annotation
from sparring.batch.annotations import required
from sparring.types import Sample

NEEDS = (Annotation.REFERENCE, Annotation.RIGHT)
"""Annotations that the reward model reads, written by credit: the reference's log-probabilities, and 1 or 0 for right
or wrong rollouts."""


def implicit_rows(rows: Sequence[Sample]) -> list[Sample]:
    """Return the rows for the preference term: wanted if the rollout was right, else unwanted.

    All branches of a trajectory are one reply with a total weight of 1; the trajectory's id is their group.
    Temperature, kept sets and biases are copied, so log-probabilities are of the distribution that was sampled from, as
    are the reference's log-probabilities. Raises SparringError for a row without an annotation of `NEEDS`.
    """
    weighted = [row for row in rows if any(row.weights.get("policy", ()))]
    lengths: Counter[str] = Counter()
    for row in weighted:
        lengths[row.trajectory] += len(row.tokens) - row.weights["policy"].count(0.0)
    return [_row(row, 1.0 / lengths[row.trajectory]) for row in weighted]


def _row(row: Sample, share: float) -> Sample:
    required(row, NEEDS, "implicit reward model", "prime")
    weights = row.weights["policy"]
    wanted = any(right for right, weight in zip(row.annotations[Annotation.RIGHT], weights, strict=True) if weight)
    return Sample(
        id=row.id,
        group=row.trajectory,
        source=row.source,
        tokens=row.tokens,
        weights={"preference": tuple([share if weight else 0.0 for weight in weights])},
        temperature=row.temperature,
        kept=row.kept,
        bias=row.bias,
        annotations={Annotation.REFERENCE: row.annotations[Annotation.REFERENCE]},
        label=1.0 if wanted else -1.0,
    )
