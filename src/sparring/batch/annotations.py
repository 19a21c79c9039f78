"""Agreement of the rows of one batch on their annotations."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.errors import SparringError
from sparring.types import Sample


def agreed(rows: Sequence[Sample]) -> list[str]:
    """Return the names of the annotations of `rows`, sorted.

    A loss reads a column of values per annotation. A column that one row lacks would be missing for all: without
    `proximal`, say, every ratio of the batch would be 1 and nothing be clipped.

    Raises:
        SparringError: two rows carry different ones.
    """
    if not rows:
        return []
    first = rows[0]
    for row in rows:
        if row.annotations.keys() != first.annotations.keys():
            raise SparringError(
                f"row {row.id}: expected the annotations of row {first.id} of the same batch, {_named(first)}, "
                f"got {_named(row)}; annotate every row of a batch alike, with zeros where there is no value"
            )
    return sorted(first.annotations)


def _named(row: Sample) -> str:
    return ", ".join(sorted(row.annotations)) or "none"
