"""`[rl.stop]` and `[distill.stop]`: early stopping."""

from __future__ import annotations

import math

import msgspec


class StopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rl.stop]`, `[distill.stop]`: early stopping once a metric reaches a value or stops improving. If the metric is
    from evaluations during training, such as `rl/eval/success`, updates wait for it, so that a resumed or repeated run
    stops after the same step."""

    metric: str = "rollout/reward"
    """Name of the metric: a metric of each step, or of evaluations during training (`rl/eval/success`, with `[eval]
    every`)."""

    highest: bool = True
    """Treat higher values as better."""

    target: float | None = None
    """Stop once a value is this good. None: never."""

    patience: int = 0
    """Stop once this many values in a row have not improved on the best before them; 0: never."""

    min_delta: float = 0.0
    """Minimum improvement for `patience`."""

    after: int = 0
    """Minimum number of steps."""

    def __post_init__(self) -> None:
        if not self.patience and self.target is None:
            raise ValueError("patience or target must be set, got neither")
        if self.patience < 0 or self.after < 0 or not 0 <= self.min_delta < math.inf:
            raise ValueError("patience, after and min_delta must be 0 or more")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target must be a finite number, got {self.target}")
