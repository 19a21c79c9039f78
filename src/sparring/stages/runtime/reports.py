"""Reports of a stage's steps: their metrics, and a word of those that were dropped."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.observe.sinks.sink import Sink

METRIC = "tokens_dropped"
"""Metric of a dropped step (`Trainer.step`); that of a model beside the policy begins with its role and a slash."""


class StepReports:
    """Reports of a stage's updates. The first in a row whose gradient was not finite is said in a line.

    Args:
        sink: of the run.
        stage: the stage's name.
    """

    def __init__(self, sink: Sink, stage: str) -> None:
        self._sink, self._stage = sink, stage
        self._before: frozenset[str] = frozenset()

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of the update that made `version`."""
        self._sink.log(self._stage, version, metrics)
        dropped = {name.removesuffix(METRIC): tokens for name, tokens in metrics.items() if name.endswith(METRIC)}
        for prefix in sorted(dropped.keys() - self._before):
            whose = f"{prefix.rstrip('/')}'s gradient" if prefix else "gradient"
            self._sink.event(
                self._stage,
                f"step {version}: the {whose} was not finite (norm {metrics[f'{prefix}grad_norm']}): "
                f"{dropped[prefix]:.0f} tokens trained nothing; a few such steps in a row end the run",
            )
        self._before = frozenset(dropped)
