"""Reference of what an implicit process reward model learns: float64 NumPy, the paper's equation and nothing else.

Its rewards of tokens, and the advantages that are made of them, are the credit rule `prime` (see `golden.credit`).

Worked example, by hand. beta 0.5, a right rollout of two tokens and a wrong one of one; log-probabilities -1.0, -2.0
and -0.5 under the model, -2.0, -3.0 and -1.5 under the reference:

    right     r = 0.5 * (1 + 1) = 1      -log sigmoid(1)          = 0.3132617, derivative sigmoid(1) - 1 = -0.2689414
    wrong     r = 0.5 * 1 = 0.5          -log (1 - sigmoid(0.5))  = 0.9740770, derivative sigmoid(0.5) = 0.6224593
    loss      their mean                              = 0.6436693, gradient (-0.0672354, -0.0672354, 0.1556148)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from golden.preference import Vector, token_vectors


class ImplicitCase(NamedTuple):
    """M tokens of G rollouts: `rollout` [M] says of which; `right` [G] is 1 or 0."""

    logprob: np.ndarray
    reference: np.ndarray
    rollout: np.ndarray
    right: np.ndarray
    beta: float


def implicit(logprob: np.ndarray, case: ImplicitCase) -> Any:
    """The mean cross-entropy of outcome labels (arXiv 2502.01456, section 3): r(y) = beta log(pi(y) / pi_ref(y)), and
    -(o log sigmoid(r) + (1 - o) log(1 - sigmoid(r)))."""
    losses = []
    for number, right in enumerate(case.right):
        own = case.rollout == number
        reward = case.beta * np.sum(logprob[own] - case.reference[own])
        likely = 1 / (1 + np.exp(-reward))
        losses.append(-np.log(likely) if right else -np.log(1 - likely))
    return sum(losses) / len(losses)


def draw(seed: int) -> ImplicitCase:
    """Five rollouts of 1 to 6 tokens, of which two or three were right."""
    generator = np.random.default_rng(seed)
    lengths = generator.permutation([1, 2, 4, 5, 6])
    count = int(lengths.sum())
    reference = -generator.exponential(size=count)
    return ImplicitCase(
        logprob=reference + generator.normal(0, 0.5, count),
        reference=reference,
        rollout=np.repeat(np.arange(5), lengths),
        right=generator.permutation([1.0, 0.0, 1.0, 0.0, float(seed % 2)]),
        beta=(0.05, 0.5)[seed // 2 % 2],
    )


def hand() -> ImplicitCase:
    """The worked example of this page."""
    columns = [-1.0, -2.0, -0.5], [-2.0, -3.0, -1.5]
    return ImplicitCase(*map(np.array, columns), np.array([0, 0, 1]), np.array([1.0, 0.0]), 0.5)


def vectors(seeds: int = 4) -> list[Vector]:
    """Of every seed: the inputs, the loss and its gradient by the model's log-probabilities."""
    return token_vectors("implicit", implicit, ((case, {"beta": case.beta}) for case in map(draw, range(seeds))))
