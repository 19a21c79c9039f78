"""Early end of an online stage. It depends on recorded values alone, so a resumed run ends after the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from sparring.protocols import Store
from sparring.recipe.sections.stop import StopConfig
from sparring.stages.runtime.checkpoint_names import is_held_out


class Evaluations(Protocol):
    """Evaluations during training."""

    async def finish(self) -> None:
        """Wait for the evaluation in progress."""


class Stopping:
    """Rule that ends a stage by the values of a metric, read in order.

    Args:
        config: rule of the recipe; None: the stage runs to its last step.

    Attributes:
        reason: reason of the early end; empty until then.
        step: last step of a stage that ended early; 0 until then.
    """

    def __init__(self, config: StopConfig | None, stage: str, store: Store, say: Callable[[str], None]) -> None:
        self._config, self._stage, self._store, self._say = config, stage, store, say
        self._best, self._best_step, self._num_worse = math.nan, 0, 0
        self.reason, self.step = "", 0

    def remaining(self, steps: Iterable[int]) -> Iterator[int]:
        """Yield the steps until the stage ends."""
        for step in steps:
            if self.reason:
                return
            yield step

    async def resume(self, done: int, evaluations: Evaluations) -> None:
        """Read the values of the first `done` steps again."""
        config = self._config
        if config is None or not done:
            return
        if is_held_out(self._stage, config.metric):
            await evaluations.finish()
            recorded = self._eval_values(0)
        else:
            steps = self._store.metrics(self._stage)
            recorded = [(step, values[config.metric]) for step, values in steps if config.metric in values]
        for step, value in recorded:
            if step <= done:
                self._observe(step, value)

    async def after(self, step: int, metrics: Mapping[str, float], evaluations: Evaluations) -> bool:
        """Read the values of a finished step, whose evaluation has begun if it is due; return whether the stage has
        ended."""
        config = self._config
        if config is None:
            return False
        if not is_held_out(self._stage, config.metric):
            if config.metric in metrics:
                self._observe(step, metrics[config.metric])
            return bool(self.reason)
        await evaluations.finish()
        for evaluated, value in self._eval_values(step):
            self._observe(evaluated, value)
        return bool(self.reason)

    def result(self) -> dict[str, object]:
        """Return step and reason of an early end as `ended_early`, else nothing."""
        return {"ended_early": {"step": self.step, "reason": self.reason}} if self.reason else {}

    def _eval_values(self, first: int) -> list[tuple[int, float]]:
        assert self._config is not None, "who asks looks for a metric"
        stage = f"{self._stage}/eval"
        name = self._config.metric.removeprefix(f"{stage}/")
        results = self._store.metrics(stage, after=first - 1)
        return [(step, values[name]) for step, values in results if name in values]

    def _observe(self, step: int, value: float) -> None:
        config = self._config
        if config is None or self.reason or math.isnan(value):
            return
        sign = 1.0 if config.highest else -1.0
        if math.isnan(self._best) or sign * (value - self._best) > config.min_delta:
            self._best, self._best_step, self._num_worse = value, step, 0
        else:
            self._num_worse += 1
        if step < config.after:
            return
        if config.target is not None and sign * (value - config.target) >= 0:
            self._end(step, f"{config.metric} is {value:.4g}, as good as {config.target:.4g}")
        elif config.patience and self._num_worse >= config.patience:
            best = f"{self._best:.4g} after step {self._best_step}"
            self._end(step, f"{config.metric} has not been better than {best} in {self._num_worse} values")

    def _end(self, step: int, reason: str) -> None:
        self.step, self.reason = step, reason
        self._say(f"ended after step {step}: {reason}")
