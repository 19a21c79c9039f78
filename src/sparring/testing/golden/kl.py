"""Golden vectors of the adaptive coefficient of a KL penalty: plain data (JSON) in and out.

    for case in cases():
        ...  # coefficient, target, gain, updates (per trajectory the sum of log(behaviour / reference)) -> coefficients

Worked example, by hand. Coefficient 0.2, target 6, gain 0.1: trajectories of 6 and 7.2
nats have a mean of 6.6, an error of 0.1, and give 0.2 * 1.01 = 0.202; trajectories of 60 nats give 0.2 * 1.02 = 0.204.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def adaptive(coefficient: float, target: float, gain: float, updates: Sequence[Sequence[float]]) -> list[float]:
    """The coefficient of every update and of the one after the last (arXiv 1909.08593)."""
    now, found = coefficient, [coefficient]
    for divergences in updates:
        error = np.clip((np.mean(divergences) - target) / target, -0.2, 0.2)
        now = float(now * (1 + gain * error))
        found.append(now)
    return found


def cases() -> Iterator[dict[str, Any]]:
    """The golden cases; see above."""
    random = np.random.default_rng(7)
    for name, scale in (("near", 1.0), ("far", 20.0)):
        updates = [(scale * (6.0 + random.standard_normal(5))).tolist() for _ in range(6)]
        coefficients = adaptive(0.2, 6.0, 0.1, updates)
        given = {"coefficient": 0.2, "target": 6.0, "gain": 0.1, "updates": updates}
        yield {"part": "adaptive", "name": name, **given, "coefficients": coefficients}
