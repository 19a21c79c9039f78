"""Totals of a training stage over all steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparring.types import Batch, TokenAccount


@dataclasses.dataclass(kw_only=True, slots=True)
class Totals:
    """Totals over all steps of a stage, saved with every checkpoint and reported by the stage's result.

    Attributes:
        logprob_max_abs_diff: largest difference between the trainer's and the engine's log-probabilities; None: no
            fresh token was trained.
    """

    account: TokenAccount = dataclasses.field(default_factory=TokenAccount)
    logprob_max_abs_diff: float | None = None
    lag_max: float = 0.0
    overlap_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0

    @staticmethod
    def of(saved: Mapping[str, Any]) -> Totals:
        """Return totals from the plain data that a checkpoint keeps."""
        return Totals(**{**saved, "account": TokenAccount(**saved["account"])})

    def add(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        """Add one step. A dropped step (`Trainer.step`) trained no token."""
        dropped = "tokens_dropped" in metrics and not metrics["updated"]
        self.account += batch.account.untrained() if dropped else batch.account
        self.logprob_max_abs_diff = _larger(self.logprob_max_abs_diff, metrics.get("logprob_max_abs_diff"))
        self.lag_max = max(self.lag_max, metrics.get("rollout/lag_max", 0.0))
        self.overlap_s += metrics["time/overlap"] * metrics["time/step_s"]
        self.step_s += metrics["time/step_s"]
        self.steps += 1


def _larger(largest: float | None, value: float | None) -> float | None:
    if largest is None or value is None:
        return value if largest is None else largest
    return value if value != value or value > largest else largest
