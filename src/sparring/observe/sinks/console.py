"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from sparring.observe.headline import Pace, clock_text, headlines
from sparring.observe.sinks.sink import SampleRow
from sparring.observe.terminal import say


class ConsoleSink:
    """Progress with a line per step, at most one in `every_s` seconds by the monotonic `clock`, except for the first
    and last step. Implements `Sink`."""

    def __init__(self, stream: TextIO, *, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._stage, self._pace = "", Pace(0, clock)
        self._printed = -math.inf

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Print that a stage begins."""
        self._stage, self._pace = stage, Pace(total_steps, self._clock, at_once)
        self._printed = -math.inf
        self._print(f"{stage}: {total_steps} steps" if total_steps else stage)

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Print a step's line if it is due. Steps of a stage other than the latest are ignored."""
        if stage != self._stage:
            return
        self._pace.advance(step)
        now = self._clock()
        if now - self._printed < self._every_s and step != self._pace.total_steps:
            return
        self._printed = now
        figures = "".join(f"  {label} {text}" for label, text in headlines(values))
        self._print(f"{stage} {step}/{self._pace.total_steps}  eta {clock_text(self._pace.remaining_s)}{figures}")

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Print nothing: rollouts are in the report."""

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        self._print(f"{stage}: {text}")

    def close(self) -> None:
        """Leave the stream open, which the caller owns."""

    def _print(self, line: str) -> None:
        say(line, stream=self._stream)
