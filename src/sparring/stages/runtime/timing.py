"""Timing of live training: which share of a step went into generating, training, both or neither."""

from __future__ import annotations

import time

from sparring.observe.spans import Spans
from sparring.protocols import Engine

ENGINE_SPANS = {"generate": "generating", "stream": "generating", "score": "scoring", "pull": "updating"}
"""Activity of each timed method of an engine (`observe.hooks.timed`)."""
TRAINER_SPANS = {
    "forward": "training",
    "score": "training",
    "forward_backward": "training",
    "step": "training",
    "push": "updating",
}
"""Activity of each timed method of a trainer."""


class EngineCounters:
    """Metrics of an engine, step by step.

    Args:
        engine: counts from its start on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = dict(engine.metrics)

    def lap(self) -> dict[str, float]:
        """Return the metrics of the step that ends now as `engine/<name>`: the growth of counts since the last call,
        and levels (`..._now`, `max_...`) as they are."""
        before, self._before = self._before, dict(self._engine.metrics)
        is_level = {name: name.endswith("_now") or name.startswith("max_") for name in self._before}
        return {
            f"engine/{name}": value - (0.0 if is_level[name] else before.get(name, 0.0))
            for name, value in self._before.items()
        }


class StepClock:
    """Times of one step, for its metrics."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._last = time.monotonic()

    def lap(self, tokens: float) -> dict[str, float]:
        """Return the metrics of the step that ends now: `time/step_s`, `time/<activity>` as shares of it, and
        `time/tokens_per_s`.

        Args:
            tokens: sampled tokens of the step.
        """
        now = time.monotonic()
        step_s, self._last = now - self._last, now
        shares = {f"time/{name}": share for name, share in self._spans.shares().items()}
        return {"time/step_s": step_s, "time/tokens_per_s": tokens / step_s if step_s else 0.0, **shares}
