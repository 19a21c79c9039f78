"""Headline figures of a stage, in one order everywhere, and its progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

HEADLINES: tuple[tuple[str, str, str], ...] = (
    ("loss", "loss_imitate", "{:.3f}"),
    ("preference loss", "loss_preference", "{:.3f}"),
    ("accuracy", "accuracy", "{:.1%}"),
    ("margin", "reward_margin", "{:.3f}"),
    ("reward", "rollout/reward", "{:.3f}"),
    ("success", "rollout/success", "{:.1%}"),
    ("tokens/s", "time/tokens_per_s", "{:,.0f}"),
    ("generating", "time/generating", "{:.0%}"),
    ("training", "time/training", "{:.0%}"),
    ("updating", "time/updating", "{:.0%}"),
    ("waiting", "time/waiting", "{:.0%}"),
    ("logprob difference", "logprob_max_abs_diff", "{:.3g}"),
    ("mean", "logprob_mean_abs_diff", "{:.2g}"),
    ("k3", "mismatch_k3", "{:.2g}"),
    ("effective samples", "mismatch_ess", "{:.2%}"),
)
"""(label, metric, format) of the headline figures. Metrics that a step does not report are left out."""
_OF_A_DIFFERENCE = ("logprob_mean_abs_diff", "mismatch_k3", "mismatch_ess")


def headlines(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, text) of the headline figures of a step. If engine and trainer agree to the bit, only the largest
    of the differences is returned."""
    hidden = () if values.get("logprob_max_abs_diff") else _OF_A_DIFFERENCE
    return [
        (label, text.format(values[name]))
        for label, name, text in HEADLINES
        if name not in hidden and math.isfinite(values.get(name, math.nan))
    ]


class Pace:
    """Progress of a stage, with its remaining time at the mean pace of this process's steps."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic, at_once: int = 1) -> None:
        self.total_steps = total_steps
        self._at_once = at_once
        self.step = 0
        self._clock = clock
        self._began = clock()
        self._done = 0

    def advance(self, step: int) -> None:
        """Count a finished step. A resumed stage begins with a later step than 1."""
        self.step = step
        self._done += 1

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage began in this process."""
        return self._clock() - self._began

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the stage ends; None until `at_once` steps have ended, or, if that is fewer, half of the steps
        that were left when this process began."""
        left = max(0, self.total_steps - self.step)
        if left and self._done < min(self._at_once, max(1, (self._done + left) // 2)):
            return None
        return self.elapsed_s / self._done * left if self._done else None


def clock_text(seconds: float | None) -> str:
    """Write a time as `1:02:03`, `2:03`, or `-:--` if it is unknown."""
    if seconds is None:
        return "-:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
