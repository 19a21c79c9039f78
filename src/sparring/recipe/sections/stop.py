"""`[rl.stop]` and `[distill.stop]`: a stage that ends before its last step."""

from __future__ import annotations

import math

import msgspec


class StopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.stop]`, `[distill.stop]`: end of the stage before its last step, once a metric has reached a value or no
    longer improves. A figure of the evaluation beside training, such as `rl/eval/success`, is waited for: updates stand
    still until it is there, so that a run that is resumed or repeated ends after the same step."""

    metric: str = "rollout/reward"
    """Metric that is watched: one of each step, or a figure of the evaluation beside training (`rl/eval/success`, with
    `[eval] every`)."""

    highest: bool = True
    """Treat a higher value as better."""

    target: float | None = None
    """End once a value is this good. None: no value is."""

    patience: int = 0
    """End once so many values in a row have not been better than the best before them; 0: never."""

    min_delta: float = 0.0
    """Difference that a value must be better by, for `patience`."""

    after: int = 0
    """Steps that are done in any case."""

    def __post_init__(self) -> None:
        if not self.patience and self.target is None:
            raise ValueError("patience or target must be set, got neither")
        if self.patience < 0 or self.after < 0 or not 0 <= self.min_delta < math.inf:
            raise ValueError("patience, after and min_delta must be 0 or more")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be a finite number, got {self.target}")
