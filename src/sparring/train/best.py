"""The best checkpoint of a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparring.types import CheckpointRef


def best_of(refs: Sequence[CheckpointRef], metric: str, is_highest: bool) -> CheckpointRef | None:
    """Return the best of those checkpoints that have a metric; the earlier one wins a tie. None where none has it.

    Args:
        refs: of one stage, oldest first.
        metric: key of `CheckpointRef.metrics`.
        is_highest: whether a higher value is better.
    """
    sign = 1.0 if is_highest else -1.0
    rated = [ref for ref in refs if not math.isnan(ref.metrics.get(metric, math.nan))]
    return max(rated, key=lambda ref: sign * ref.metrics[metric], default=None)
