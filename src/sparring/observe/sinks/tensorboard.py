"""TensorBoard event files, written by TensorBoard's own writer (no torch)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.observe.sinks.sink import SampleRow


class TensorboardSink:
    """Scalars as `<stage>/<name>` by step, samples as the text `<stage>/samples`."""

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._text = lambda tag, cells: Summary.Value(tag=tag, metadata=text, tensor=TensorProto(**_table(cells)))
        self._writer = EventFileWriter(str(folder))

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Write nothing: TensorBoard has no notion of a stage."""

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write the finite values."""
        rows = [
            self._summary.Value(tag=f"{stage}/{name}", simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._write(step, rows)

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Write a table."""
        cells = [(row.rollout, row.task, row.conversation, f"{row.reward}", row.outcome) for row in rows]
        self._write(step, [self._text(f"{stage}/samples", cells)])

    def event(self, stage: str, text: str) -> None:
        """Write nothing: the run's store and `metrics.jsonl` hold events."""

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()

    def _write(self, step: int, values: Sequence[Any]) -> None:
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)


_STRINGS = 7
"""`DT_STRING` of TensorFlow's types.proto."""
_HEADS = ("rollout", "task", "conversation", "reward", "outcome")


def _table(rows: Sequence[tuple[str, ...]]) -> dict[str, object]:
    """Return the fields of a tensor of text, strings [rows + 1, 5], which TensorBoard's text plugin draws as a table.
    It reads each cell as Markdown, so a cell is a block of code, in which nothing is markup."""
    cells = [*_HEADS, *(_as_code(text) for row in rows for text in row)]
    shape = {"dim": [{"size": len(rows) + 1}, {"size": len(_HEADS)}]}
    return {"dtype": _STRINGS, "tensor_shape": shape, "string_val": [cell.encode() for cell in cells]}


def _as_code(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return "\n".join(f"    {line}" for line in clean.splitlines()) or " "
