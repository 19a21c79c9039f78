"""`UnsavedCalls`: what a trainer was asked since its last checkpoint, to be asked again of ranks that replace it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO

from sparring.types import CheckpointRef


class UnsavedCalls:
    """Calls that changed a trainer since its last checkpoint, with their data in a file without a name.

    Attributes:
        base: last checkpoint; None: the model's folder.
        steps: optimiser steps since then.
    """

    def __init__(self) -> None:
        self.base: CheckpointRef | None = None
        self.steps = 0
        self._calls: list[tuple[str, int, int]] = []
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yield method and data of each call, in order."""
        for method, offset, length in self._calls:
            self._file.seek(offset)
            yield method, self._file.read(length)

    def add(self, method: str, data: bytes) -> None:
        """Keep a call."""
        offset = self._file.seek(0, 2)
        self._file.write(data)
        self._calls.append((method, offset, len(data)))
        self.steps += method == "step"

    def saved(self, base: CheckpointRef) -> None:
        """Drop all calls, because a checkpoint has what they did."""
        self.base, self.steps = base, 0
        self._calls.clear()
        self._file.truncate(0)

    def close(self) -> None:
        """Drop the file. Safe to call twice."""
        self._file.close()
