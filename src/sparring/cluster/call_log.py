"""`UnsavedCalls`: calls of a trainer since its last checkpoint. Ranks that replace lost ranks get these calls again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from sparring.errors import StoreError, boundary
from sparring.types import CheckpointRef

BACKWARD, STEP = "forward_backward", "step"
"""Names of the calls that change a trainer."""


class UnsavedCall(NamedTuple):
    """Call whose data is in the file of `UnsavedCalls`. `failed`: the call raised an error, and will do so again."""

    method: str
    offset: int
    length: int
    failed: bool = False


class UnsavedCalls:
    """Calls that changed a trainer since its last checkpoint `base` (None: since the model was loaded), with their data
    in an unnamed temporary file."""

    def __init__(self) -> None:
        self.base: CheckpointRef | None = None
        self._calls: list[UnsavedCall] = []
        self._end = 0
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def __iter__(self) -> Iterator[tuple[UnsavedCall, bytes]]:
        """Yield each call and its data, in order."""
        for call in self._calls:
            data = bytearray()
            while len(data) < call.length:
                data += os.pread(self._file.fileno(), call.length - len(data), call.offset + len(data))
            yield call, bytes(data)

    @property
    def steps(self) -> int:
        """Number of optimiser steps since the last checkpoint."""
        return sum(call.method == STEP for call in self._calls)

    def write(self, method: str, data: bytes) -> UnsavedCall:
        """Write a call to the file before the call is made; `add` then keeps it. Raises StoreError if the disk is full,
        when the call has changed nothing yet."""
        rest, at = memoryview(data), self._end
        folder = tempfile.gettempdir()
        with boundary(StoreError, f"temporary files in {folder}", f"room for {len(data)} bytes", "free some space"):
            while rest:
                written = os.pwrite(self._file.fileno(), rest, at)
                rest, at = rest[written:], at + written
        return UnsavedCall(method, self._end, len(data))

    def add(self, call: UnsavedCall) -> None:
        """Keep a call that was made."""
        self._calls.append(call)
        self._end = call.offset + call.length

    def failed(self, call: UnsavedCall) -> None:
        """Record a call that raised an error. A failed `step` is kept. After a failed `forward_backward` a trainer has
        no gradients, so all calls since the last step are dropped."""
        if call.method == STEP:
            self.add(call._replace(failed=True))
        else:
            del self._calls[self._stepped :]

    def saved(self, base: CheckpointRef) -> None:
        """Drop all calls up to the last step, because the new checkpoint `base` contains their effects."""
        self.base = base
        del self._calls[: self._stepped]
        if not self._calls:
            self._file.truncate(0)
            self._end = 0

    def restored(self, base: CheckpointRef) -> None:
        """Drop all calls, because the trainer was restored to the checkpoint `base`."""
        self._calls.clear()
        self.saved(base)

    def close(self) -> None:
        """Drop the file. Safe to call twice."""
        self._file.close()

    @property
    def _stepped(self) -> int:
        return max((number for number, call in enumerate(self._calls, 1) if call.method == STEP), default=0)
