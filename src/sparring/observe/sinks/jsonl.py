"""JSON Lines: one object per step or event, `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class JsonlSink:
    """Appends `{"time", "stage", "step", "values"}`, `{"time", "stage", "total_steps"}` or `{"time", "stage", "event"}`.

    A resumed run appends too: where a step stands twice, the later line counts. A value that is not finite is null.
    A line is one write, so a killed run leaves whole lines; a line that a full disk cut short is ended before the next.
    """

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  (held until close)
        if self._file.tell():
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def start(self, stage: str, total_steps: int) -> None:
        """Write a line."""
        self._write({"stage": stage, "total_steps": total_steps})

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Write a line."""
        self._write({"stage": stage, "step": step, "values": dict(values)})

    def event(self, stage: str, text: str) -> None:
        """Write a line."""
        self._write({"stage": stage, "event": text})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode({"time": time.time(), **line}) + b"\n")
