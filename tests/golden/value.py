"""Reference of the critic's loss: float64 NumPy, the papers' equations and nothing else.

`vectors` are inputs, settings, losses and gradients for any other implementation to be held against.

Worked example, by hand. Clip 0.2, three tokens of weight 1; each was worth 0.5 before the update and is worth, now,
0.6, 1.0 and 1.0, where 1.0, 1.0 and 0.0 was earned:

    0.6    moved by 0.1, not held                                   1/2 (0.6 - 1)^2                     = 0.08
    1.0    held at 0.7: worse than the 0 without it                 1/2 (0.7 - 1)^2    = 0.045, no gradient
    1.0    held at 0.7: better than without it, which counts        1/2 max(1^2, 0.7^2)                 = 0.5
           the mean of the three                                                                        = 0.2083333
           its gradient is (0.6 - 1, 0, 1) / 3

The returns' variance is 2/9, their mean 2/3; the errors 0.4, 0 and -1 have the mean -0.2 and the variance 1.16 / 3 -
0.04: explained variance 1 - 0.3466667 / 0.2222222 = -0.56.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from golden.preference import Vector, gradients

CLIPS = (0.2, 0.5, 0.0)
"""Settings of the vectors."""


class ValueCase(NamedTuple):
    """M tokens: what the critic said before the update and says now, what was earned, what each counts."""

    old: np.ndarray
    now: np.ndarray
    earned: np.ndarray
    weights: np.ndarray


def value(now: np.ndarray, case: ValueCase, *, clip: float) -> Any:
    """arXiv 1707.06347, equation 9, with the larger of the plain and the clipped error (arXiv 2005.12729, section
    3)."""
    plain = (now - case.earned) ** 2
    if clip == 0:
        return np.sum(case.weights * plain) / np.sum(case.weights) / 2
    moved = now - case.old
    moved = np.where(np.real(moved) > clip, clip, np.where(np.real(moved) < -clip, -clip, moved))
    held = (case.old + moved - case.earned) ** 2
    return np.sum(case.weights * np.where(np.real(held) > np.real(plain), held, plain)) / np.sum(case.weights) / 2


def explained_variance(now: np.ndarray, earned: np.ndarray) -> float:
    """1 - Var(earned - now) / Var(earned)."""
    return float(1 - np.var(earned - now) / np.var(earned))


def draw(seed: int, count: int = 12) -> ValueCase:
    """Values that moved less and further than any of `CLIPS`, towards what was earned and away from it."""
    generator = np.random.default_rng(seed)
    old = generator.normal(size=count)
    now, earned = old + generator.normal(scale=0.5, size=count), generator.normal(size=count)
    return ValueCase(old, now, earned, generator.uniform(0.5, 2, count))


def vectors(seeds: int = 3) -> list[Vector]:
    """Of every setting and seed: the inputs, the loss and its gradient for what the critic says now."""
    result = []
    for clip in CLIPS:
        for case in map(draw, range(seeds)):
            (gradient,) = gradients(lambda inputs, case=case, clip=clip: value(inputs[0], case, clip=clip), [case.now])
            inputs = {name: values.tolist() for name, values in case._asdict().items()}
            loss = float(value(case.now, case, clip=clip))
            result.append(Vector("value", {"clip": clip}, inputs, loss, {"now": gradient.tolist()}))
    return result
