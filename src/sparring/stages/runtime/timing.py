"""Timing of online training: shares of a step spent generating, training, both or neither, and causes of idle engines
and trainers."""

from __future__ import annotations

import time

from sparring.observe.spans import Spans, shares, shares_by_cause
from sparring.protocols import Engine

ENGINE_SPANS = {
    "generate": "generating",
    "stream": "generating",
    "score": "scoring",
    "pull": "updating",
    "wake": "updating",
}
"""Activity of each timed method of an engine (`observe.hooks.timed`)."""
TRAINER_SPANS = {
    "forward": "training",
    "score": "training",
    "forward_backward": "training",
    "step": "training",
    "push": "updating",
}
"""Activity of each timed method of a trainer."""
EVAL_SPANS = {"generate": "evaluating", "stream": "evaluating"}
"""Activity of each timed method of the engine when an evaluation calls it."""
BESIDE = ("worlds", "judging", "saving", "evaluating")
"""Other activities: phases of rollouts (`rollout/phases.py`), checkpoints and evaluation."""
ENGINE_CAUSES = (
    ("updating", "update"),
    ("worlds", "worlds"),
    ("judging", "scoring"),
    ("saving", "saving"),
    ("training", "training"),
)
"""Activities that an idle engine waits for, each with the name of the cause; the first one in progress counts."""
TRAINER_CAUSES = (
    ("updating", "update"),
    ("saving", "saving"),
    ("straggling", "slowest_rollout"),
    ("generating", "generating"),
    ("scoring", "annotating"),
    ("worlds", "worlds"),
    ("judging", "scoring"),
    ("evaluating", "evaluation"),
)
"""Activities that an idle trainer waits for, each with the name of the cause; the first one in progress counts."""


class EngineCounters:
    """Metrics of an engine for each step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before, self._last = dict(engine.metrics), time.monotonic()

    def lap(self) -> dict[str, float]:
        """Return the metrics of the step that ends now as `engine/<name>`: the growth of counts since the last call,
        and the present levels (`..._now`, `max_...`). With several engines, `tokens` of each becomes `tokens_per_s`."""
        before, self._before = self._before, dict(self._engine.metrics)
        lap, last, self._last = dict[str, float](), self._last, time.monotonic()
        for name, value in self._before.items():
            is_level = name.endswith("_now") or name.startswith("max_")
            grown = value if is_level else value - before.get(name, 0.0)
            of_one = name.endswith("/tokens")
            lap[f"engine/{name}{'_per_s' * of_one}"] = grown / max(self._last - last, 1e-9) if of_one else grown
        return lap


class StepClock:
    """Clock of steps; the first step begins now, and the account `spans` starts anew."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        spans.lap()
        self._last = time.monotonic()

    def lap(self, tokens: float) -> dict[str, float]:
        """Return the metrics of the step that ends now.

        Those are `time/step_s`, `time/<activity>` as shares of the step, and `time/tokens_per_s`. Shares in which the
        engine was `busy` or idle for a cause are `time/engine/<cause>` and add up to 1; `time/trainer/<cause>`
        likewise.
        """
        now = time.monotonic()
        step_s, self._last = now - self._last, now
        seconds, main = self._spans.lap(), {*ENGINE_SPANS.values(), *TRAINER_SPANS.values()}
        activities = shares(seconds, main) | {name: shares(seconds).get(name, 0.0) for name in BESIDE}
        engine = shares_by_cause(seconds, ("generating", "scoring", "evaluating"), ENGINE_CAUSES)
        trainer = shares_by_cause(seconds, ("training",), TRAINER_CAUSES)
        return {
            "time/step_s": step_s,
            "time/tokens_per_s": tokens / step_s if step_s else 0.0,
            **{f"time/{name}": share for name, share in activities.items()},
            **{f"time/engine/{cause}": share for cause, share in engine.items()},
            **{f"time/trainer/{cause}": share for cause, share in trainer.items()},
        }
