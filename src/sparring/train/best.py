"""Choice of a stage's best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparring.types import CheckpointRef


def best_of(refs: Sequence[CheckpointRef], metric: str, is_highest: bool) -> CheckpointRef | None:
    """Return the checkpoint with the best value of `metric`, a key of `CheckpointRef.metrics`; for ties, the earlier
    checkpoint. Return None if no checkpoint has the metric. `refs` are the checkpoints of one stage, oldest first."""
    sign = 1.0 if is_highest else -1.0
    rated = [ref for ref in refs if not math.isnan(ref.metrics.get(metric, math.nan))]
    return max(rated, key=lambda ref: sign * ref.metrics[metric], default=None)
