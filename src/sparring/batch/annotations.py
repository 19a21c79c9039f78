"""Checks of the annotations that rows carry."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.annotations import Annotation
from sparring.errors import SparringError
from sparring.types import Sample


def agreed(rows: Sequence[Sample]) -> list[Annotation]:
    """Return the names of the annotations that all `rows` carry, sorted. Raises SparringError if rows carry different
    annotations.

    A loss reads one column of values per annotation, so an annotation that one row lacks would be missing for all.
    Without `proximal`, for example, every ratio would be 1 and no token would be clipped.
    """
    if not rows:
        return []
    first = rows[0]
    for row in rows:
        if row.annotations.keys() != first.annotations.keys():
            raise SparringError(
                f"row {row.id}: expected the annotations of row {first.id} of the same batch, {_names(first)}, "
                f"got {_names(row)}; annotate every row of a batch alike, with zeros where there is no value"
            )
    return sorted(first.annotations)


def required(row: Sample, names: Sequence[str], reader: str, credit: str) -> None:
    """Refuse a row without the annotations that `credit` writes for `reader` (`SparringError`)."""
    for name in names:
        if name not in row.annotations:
            problem = f"expected the annotation '{name}' for the {reader}, got none; use credit {credit}"
            raise SparringError(f"sample {row.id}: {problem}")


def _names(row: Sample) -> str:
    return ", ".join(sorted(row.annotations)) or "none"
