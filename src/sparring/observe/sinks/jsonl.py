"""Sink of JSON Lines: one object per step or event, in `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sparring.disk import shortage
from sparring.errors import StoreError
from sparring.observe.sinks.sink import SampleRow


class JsonlSink:
    """Sink that appends `{"time", "stage", "step", "values"}`, `{"time", "stage", "total_steps"}` or `{"time", "stage",
    "event"}` with the event's facts. Implements `Sink`.

    A resumed run appends to the file: the later line of a repeated step counts. Non-finite values are null. A line is
    one write, so a killed run leaves complete lines; a line truncated by a full disk is terminated before the next one.

    Raises:
        StoreError: the disk is full or broken. Earlier lines are kept.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with self._store_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
            if self._file.tell():
                self._file.seek(-1, 2)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Write a line with the stage's number of steps."""
        self._write({"stage": stage, "total_steps": total_steps})

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._write({"stage": stage, "step": step, "values": dict(values)})

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Write nothing: the store has the rollouts."""

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        self._write({"stage": stage, "event": text, **facts})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        data = msgspec.json.encode({"time": time.time(), **line}) + b"\n"
        with self._store_errors():
            while data:  # a disk that takes a part of a line refuses the rest, and says why
                data = data[self._file.write(data) :]

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            actual, fix = shortage(error, self._path) or (str(error), "check the folder and the disk")
            again = "then run the same command again"
            raise StoreError(f"{self._path}: expected to write a line, got {actual}; {fix}, {again}") from error
