"""Reports of a stage's steps: metrics, and dropped updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparring.observe.sinks.sink import SampleRow, Sink

DROPPED = "tokens_dropped"
"""Metric of a dropped step (`Trainer.step`); models other than the policy have their role and a slash as prefix."""


class StepReports:
    """Reports of a stage's updates. Only the first of several consecutive dropped updates is reported in a sentence.

    Args:
        samples: function that returns rollouts of a step for a table; may return none.
    """

    def __init__(self, sink: Sink, stage: str, samples: Callable[[int], Sequence[SampleRow]] = lambda _: ()) -> None:
        self._sink, self._stage, self._samples = sink, stage, samples
        self._reported: frozenset[str] = frozenset()

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of the update that made `version`."""
        self._sink.log(self._stage, version, metrics)
        if rows := self._samples(version):
            self._sink.samples(self._stage, version, rows)
        now = {name: value for name, value in metrics.items() if name.endswith(DROPPED)}
        for name in sorted(now.keys() - self._reported):
            role = name.rpartition("/")[0]
            what = f"the gradient was not finite: {now[name]:.0f} tokens trained nothing; more in a row end the run"
            self._sink.event(self._stage, f"step {version}: {role}{': ' if role else ''}{what}")
        self._reported = frozenset(now)
