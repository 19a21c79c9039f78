"""The learning rate of a step."""

from __future__ import annotations

import math

from sparring.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of the step after `step` finished ones.

    Warm-up: peak * (step + 1) / warmup_steps. Then, with x from 0 to 1 over the remaining steps and m = min_ratio:
    constant 1, linear 1 - (1 - m) x, cosine m + (1 - m) (1 + cos(pi x)) / 2 (SGDR, arXiv 1608.03983, equation 5), times
    the peak.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    x = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "linear":
        share = 1.0 - (1.0 - config.min_ratio) * x
    elif config.schedule == "cosine":
        share = config.min_ratio + (1.0 - config.min_ratio) * (1.0 + math.cos(math.pi * x)) / 2
    else:
        share = 1.0
    return config.learning_rate * share
