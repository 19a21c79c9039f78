"""Which model beside the trainer a row is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.types import Sample


class Compared:
    """Implements `Annotator`: names on every row the model that the trainer compares it with, and asks nobody.

    Args:
        name: of the model, among the trainer's teachers.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples with the name as their `teacher`."""
        return [replace(row, teacher=self._name) for row in samples]
