"""Golden vectors of the KL penalty in the reward and of its adaptive coefficient: plain data (JSON) in and out.

    for case in cases():
        ...  # penalty: behaviour, reference, estimator, coefficient -> rewards, per token
        ...  # adaptive: coefficient, target, gain, updates (per trajectory the sum of log(behaviour / reference)) -> coefficients

Worked example, by hand. log behaviour -1.0, log reference -1.5, coefficient 0.1: k1 costs 0.1 * 0.5 = 0.05, k2 0.1 * 0.125 =
0.0125, k3 0.1 * (exp(-0.5) - 1 + 0.5) = 0.0106531, abs 0.05. Coefficient 0.2, target 6, gain 0.1: trajectories of 6 and 7.2
nats have a mean of 6.6, an error of 0.1, and give 0.2 * 1.01 = 0.202; trajectories of 60 nats give 0.2 * 1.02 = 0.204.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sparring.testing.golden.policy_parts import absolute, k1, k2, k3


def penalty(behaviour: np.ndarray, reference: np.ndarray, estimator: str, coefficient: float) -> np.ndarray:
    """What each token earns (Ziegler et al., arXiv 1909.08593, equation 2)."""
    return -coefficient * {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}[estimator](behaviour, reference)


def adaptive(coefficient: float, target: float, gain: float, updates: Sequence[Sequence[float]]) -> list[float]:
    """The coefficient of every update and of the one after the last (arXiv 1909.08593)."""
    found = [coefficient]
    for divergences in updates:
        error = np.clip((np.mean(divergences) - target) / target, -0.2, 0.2)
        found.append(float(found[-1] * (1 + gain * error)))
    return found


def cases() -> Iterator[dict[str, Any]]:
    """The golden cases; see above."""
    random = np.random.default_rng(7)
    for estimator in ("k1", "k2", "k3", "abs"):
        behaviour = random.uniform(-3.0, -0.1, 12)
        reference = behaviour + random.standard_normal(12)
        rewards = penalty(behaviour, reference, estimator, 0.05).tolist()
        given = {"behaviour": behaviour.tolist(), "reference": reference.tolist(), "estimator": estimator, "coefficient": 0.05}
        yield {"part": "penalty", "name": estimator, **given, "rewards": rewards}
    for name, scale in (("near", 1.0), ("far", 20.0)):
        updates = [(scale * (6.0 + random.standard_normal(5))).tolist() for _ in range(6)]
        coefficients = adaptive(0.2, 6.0, 0.1, updates)
        given = {"coefficient": 0.2, "target": 6.0, "gain": 0.1, "updates": updates}
        yield {"part": "adaptive", "name": name, **given, "coefficients": coefficients}
