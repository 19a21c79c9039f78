"""TensorBoard event files, written by TensorBoard's own writer (no torch)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path


class TensorboardSink:
    """Scalars as `<stage>/<name>` by step."""

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def start(self, stage: str, total_steps: int) -> None:
        """Write nothing: TensorBoard has no notion of a stage."""

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write the finite values."""
        rows = [
            self._summary.Value(tag=f"{stage}/{name}", simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        summary = self._summary(value=rows)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def event(self, stage: str, text: str) -> None:
        """Write nothing: the run's store and `metrics.jsonl` hold events."""

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()
