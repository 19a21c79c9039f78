"""Reference of VAPO's loss: float64 NumPy, the paper's equations and nothing else.

Worked example, by hand. Two rollouts of two tokens and of one, of which the first was right; log-probabilities -1.0,
-0.5 and -2.0, which are also those that were recorded, so that every ratio is 1; advantages 1, 2 and -3; coefficient
0.1:

    policy        -(1 + 2 - 3) / 3                = 0, whose gradient is (-1/3, -2/3, 1)
    right         0.1 * (1.0 + 0.5) / 2           = 0.075, whose gradient is (-0.05, -0.05, 0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from golden.preference import Vector, token_vectors

LOW, HIGH = 0.2, 0.28
"""The clip of the preset `vapo`."""


class RightAnswersCase(NamedTuple):
    """M tokens of R rollouts: `rollout` [M] says of which; `right` [R] is 1 or 0."""

    logprob: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    rollout: np.ndarray
    right: np.ndarray
    coefficient: float


def policy(logprob: np.ndarray, case: RightAnswersCase) -> Any:
    """PPO's clipped surrogate with clip-higher, a mean over all tokens (arXiv 2504.05118, section 4)."""
    ratio = np.exp(logprob - case.behaviour)
    held = np.where(np.real(ratio) > 1 + HIGH, 1 + HIGH, np.where(np.real(ratio) < 1 - LOW, 1 - LOW, ratio))
    plain, clipped = ratio * case.advantages, held * case.advantages
    return -np.mean(np.where(np.real(plain) < np.real(clipped), plain, clipped))


def right_answers(logprob: np.ndarray, case: RightAnswersCase) -> Any:
    """mu * L_NLL (arXiv 2504.05118, section 4.3): the mean negative log-likelihood of all tokens of right rollouts."""
    right = case.right[case.rollout]
    return -case.coefficient * np.sum(right * logprob) / np.sum(right)


def vapo(logprob: np.ndarray, case: RightAnswersCase) -> Any:
    """L_PPO + mu * L_NLL."""
    return policy(logprob, case) + right_answers(logprob, case)


def draw(seed: int) -> RightAnswersCase:
    """Five rollouts of 1 to 6 tokens, of which two or three were right, and ratios on both sides of both bounds."""
    generator = np.random.default_rng(seed)
    lengths = generator.permutation([1, 2, 4, 5, 6])
    count = int(lengths.sum())
    behaviour = -generator.exponential(size=count)
    return RightAnswersCase(
        logprob=behaviour + generator.normal(0, 0.3, count),
        behaviour=behaviour,
        advantages=generator.normal(size=count),
        rollout=np.repeat(np.arange(5), lengths),
        right=generator.permutation([1.0, 0.0, 1.0, 0.0, float(seed % 2)]),
        coefficient=0.1,
    )


def hand() -> RightAnswersCase:
    """The worked example of this page."""
    logprob = np.array([-1.0, -0.5, -2.0])
    return RightAnswersCase(
        logprob, logprob, np.array([1.0, 2.0, -3.0]), np.array([0, 0, 1]), np.array([1.0, 0.0]), 0.1
    )


def vectors(seeds: int = 3) -> list[Vector]:
    """Of every seed: the inputs, the loss and its gradient by the log-probabilities."""
    clip = {"low": LOW, "high": HIGH}
    return token_vectors(
        "vapo", vapo, ((case, {"coefficient": case.coefficient, **clip}) for case in map(draw, range(seeds)))
    )
