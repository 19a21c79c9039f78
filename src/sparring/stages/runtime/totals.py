"""Totals of a training stage over all steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparring.types import Batch, TokenAccount


class Totals:
    """Totals over all steps of a stage, saved with every checkpoint.

    Attributes:
        logprob_max_abs_diff: largest difference between the trainer's and the engine's log-probabilities; None: no
            fresh token was trained.
    """

    def __init__(self, saved: Mapping[str, Any] | None) -> None:
        saved = saved or {}
        self.account = TokenAccount(**saved.get("account", {}))
        self.logprob_max_abs_diff: float | None = saved.get("logprob_max_abs_diff")
        self.lag_max = float(saved.get("lag_max", 0.0))
        self.overlap_s = float(saved.get("overlap_s", 0.0))
        self.step_s = float(saved.get("step_s", 0.0))
        self.steps = int(saved.get("steps", 0))

    def add(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Add one step. A dropped step (`Trainer.step`) trained no token."""
        dropped = "tokens_dropped" in metrics and not metrics["updated"]
        self.account += batch.account.untrained() if dropped else batch.account
        self.logprob_max_abs_diff = _larger(self.logprob_max_abs_diff, metrics.get("logprob_max_abs_diff"))
        self.lag_max = max(self.lag_max, metrics.get("rollout/lag_max", 0.0))
        self.overlap_s += metrics["time/overlap"] * metrics["time/step_s"]
        self.step_s += metrics["time/step_s"]
        self.steps += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the totals as a checkpoint keeps them and the stage's result reports them."""
        return {
            "account": dataclasses.asdict(self.account),
            "logprob_max_abs_diff": self.logprob_max_abs_diff,
            "lag_max": self.lag_max,
            "overlap_s": self.overlap_s,
            "step_s": self.step_s,
            "steps": self.steps,
        }


def _larger(largest: float | None, value: float | None) -> float | None:
    """Return the larger of two values. None stands for no value, and NaN is the largest."""
    if largest is None or value is None:
        return value if largest is None else largest
    return value if value != value or value > largest else largest
