"""Record of a stage's published versions: a resume that trains a step again must make the same weights."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from sparring.errors import SparringError
from sparring.log import LogEntry, step_name
from sparring.observe.hooks import Overlay
from sparring.protocols import Store, Trainer
from sparring.types import WeightRef


class OtherWeights(SparringError):
    """Difference between the weights of a step that is trained again and the recorded weights."""


class VersionLog:
    """Log of a stage's published versions: entries `published` with `checksum` and `digests`, 8 bytes for each tensor
    in the order of their names."""

    def __init__(self, store: Store, stage: str) -> None:
        self._store = store
        self._stage = stage

    def logged(self, trainer: Trainer) -> Trainer:
        """Return a trainer whose pushed versions are recorded before they are served, or compared with the record of an
        earlier process."""

        async def push() -> WeightRef:
            ref = await trainer.push()
            self.publish(ref)
            return ref

        overlay: Any = Overlay(trainer, {"push": push})  # a trainer, because all other methods are the trainer's
        recording: Trainer = overlay
        return recording

    def publish(self, ref: WeightRef) -> None:
        """Record a version, or compare it with the record.

        Raises:
            OtherWeights: the record has other weights for this step.
            StoreError: the record cannot be written.
        """
        name = step_name(self._stage, ref.version)
        entry = next(iter(self._store.entries(self._stage, name=name, kinds={"published"})), None)
        if entry is None:
            data = {"checksum": ref.checksum, "digests": _packed(ref.digests)}
            self._store.record(LogEntry(stage=self._stage, kind="published", name=name, data=data))
        elif (recorded := entry[1].data)["checksum"] != ref.checksum:
            raise OtherWeights(
                f"{self._stage} step {ref.version}: expected the weights that were published before the stop, checksum "
                f"{recorded['checksum']}, got {ref.checksum}{_first_difference(ref.digests, recorded['digests'])}; "
                "go on with the settings, libraries, kind of processor and version of Sparring that the run was begun "
                "with, or sample the steps behind the last checkpoint again: --set run.redo=sample"
            )


def _packed(digests: Mapping[str, int]) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *(digests[name] for name in sorted(digests)))


def _first_difference(digests: Mapping[str, int], recorded: bytes) -> str:
    """Return a clause: the first differing tensor in name order, or both counts if they differ; empty if unknown."""
    packed = _packed(digests)
    if len(packed) != len(recorded):
        return f", of {len(packed) // 8} tensors where there were {len(recorded) // 8}"
    names = (name for at, name in enumerate(sorted(digests)) if packed[8 * at :][:8] != recorded[8 * at :][:8])
    first = next(names, None)
    return "" if first is None else f", first in tensor {first}"
