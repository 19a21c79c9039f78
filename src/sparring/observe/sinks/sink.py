"""`Sink`: the protocol of sinks, and several sinks as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """Rollout as a row of a table of samples; `conversation` is the text of its messages."""

    rollout: str
    task: str
    conversation: str
    reward: float | None
    outcome: str


class Sink(Protocol):
    """Receiver of a run's metrics and events. Events come from any thread, and all else from one, with a stage's steps
    in order."""

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Begin a stage of `total_steps` steps. A resumed run may have done some of them already. `at_once` steps run
        at the same time."""
        ...

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step, counted from 1."""
        ...

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Show some of the rollouts that a step was trained on."""
        ...

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        """Record an event as a line, with facts if it is about a part of the run (`log.Report`)."""
        ...

    def close(self) -> None:
        """Flush and close. Safe to call twice."""
        ...


class Fanout:
    """Sink that forwards to several sinks in order; `record` is called with each event first. Implements `Sink`."""

    def __init__(self, sinks: Sequence[Sink], record: Callable[..., None] = lambda *event: None) -> None:
        self._sinks, self._record = tuple(sinks), record

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Forward the call to every sink."""
        for sink in self._sinks:
            sink.start(stage, total_steps, at_once)

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(stage, step, values)

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        for sink in self._sinks:
            sink.samples(stage, step, rows)

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        self._record(stage, text, facts)
        for sink in self._sinks:
            sink.event(stage, text, facts)

    def close(self) -> None:
        for sink in reversed(self._sinks):
            sink.close()
