"""Sink of TensorBoard event files, by TensorBoard's own writer (without torch)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.observe.sinks.sink import SampleRow


class TensorboardSink:
    """Sink with scalars as `<stage>/<name>` by step, and samples and events as the texts `<stage>/samples` and
    `<stage>/events`. Events about a part of the run have its step. Implements `Sink`."""

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._tensor = TensorProto
        self._metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._writer = EventFileWriter(str(folder))

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Write nothing: TensorBoard has no notion of a stage."""

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write the finite values as scalars."""
        rows = [
            self._summary.Value(tag=f"{stage}/{name}", simple_value=value)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._write(step, rows)

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        cells = [(row.rollout, row.task, row.conversation, f"{row.reward}", row.outcome) for row in rows]
        self._write(step, [self._text(f"{stage}/samples", [_HEADS, *cells])])

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        self._write(facts.get("at_step", 0), [self._text(f"{stage}/events", [("event",), (text,)])])

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, rows: Sequence[tuple[str, ...]]) -> Any:
        return self._summary.Value(tag=tag, metadata=self._metadata, tensor=self._tensor(**_table(rows)))

    def _write(self, step: int, values: Sequence[Any]) -> None:
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)


_STRINGS = 7
"""`DT_STRING` of TensorFlow's types.proto."""
_HEADS = ("rollout", "task", "conversation", "reward", "outcome")


def _table(rows: Sequence[tuple[str, ...]]) -> dict[str, object]:
    """Return the fields of a text tensor, strings [rows, columns], which TensorBoard's text plugin draws as a table.
    The first row has the column heads. The plugin reads cells as Markdown, so all other cells are code blocks."""
    cells = [*rows[0], *(_as_code(text) for row in rows[1:] for text in row)]
    shape = {"dim": [{"size": len(rows)}, {"size": len(rows[0])}]}
    return {"dtype": _STRINGS, "tensor_shape": shape, "string_val": [cell.encode() for cell in cells]}


def _as_code(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return "\n".join(f"    {line}" for line in clean.splitlines()) or " "
