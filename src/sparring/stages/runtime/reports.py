"""Reports of a stage's steps: metrics, dropped updates, and steps that correct earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparring.observe.sinks.sink import SampleRow, Sink

DROPPED, MISPLACED = "tokens_dropped", "tensors_misplaced"
"""Metrics of dropped and of correcting steps (`Trainer.step`); models other than the policy have their role and a slash
as prefix."""


class StepReports:
    """Reports of a stage's updates. Only the first of several consecutive dropped updates is reported in a sentence,
    and likewise only the first of several correcting updates.

    Args:
        sink: sink of the run.
        stage: name of the stage.
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
        now = {name: value for name, value in metrics.items() if name.endswith((DROPPED, MISPLACED))}
        for name in sorted(now.keys() - self._reported):
            role, _, kind = name.rpartition("/")
            say = _dropped_sentence if kind == DROPPED else _misplaced_sentence
            whose = f"{role}: " if role else ""
            self._sink.event(self._stage, f"step {version}: {say(whose, now[name])}")
        self._reported = frozenset(now)


def _dropped_sentence(whose: str, tokens: float) -> str:
    return f"{whose}the gradient was not finite: {tokens:.0f} tokens trained nothing; more in a row end the run"


def _misplaced_sentence(whose: str, tensors: float) -> str:
    return (
        f"{whose}{tensors:.0f} tensors are stepped right from here on. The version of Sparring that this run was begun "
        "with read their gradients in the wrong order: a run of another name (--name) is right from its start"
    )
