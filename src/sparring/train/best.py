"""Choice of a stage's best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparring.types import CheckpointRef


def best_of(refs: Sequence[CheckpointRef], metric: str, is_highest: bool) -> CheckpointRef | None:
    """Return, of one stage's checkpoints, oldest first, the one with the best value of a metric of
    `CheckpointRef.metrics`, the earlier one for ties; None if no checkpoint has the metric."""
    sign = 1.0 if is_highest else -1.0
    rated = [ref for ref in refs if not math.isnan(ref.metrics.get(metric, math.nan))]
    return max(rated, key=lambda ref: sign * ref.metrics[metric], default=None)
