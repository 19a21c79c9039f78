"""Reference of the imitate term beside the policy's: float64 NumPy, the papers' equations and nothing else.

M tokens, V vocabulary. Sampled tokens were drawn from softmax(logits / temperature), and are judged by that
distribution. Observed tokens were drawn by nobody: their likelihood is the model's own, softmax(logits), whatever the
policy sampled at.

Worked example, by hand. V = 2, temperature 1/2, logits (log 3, 0) in both places, id 0 in both; the first was sampled,
with an advantage of 2 and the probability of now, 9/10, the second is what a tool answered; scale 0.05:

    policy     -1 * 2            = -2, whose gradient is -2 / temperature * (1/10, -1/10) = (-0.4, 0.4)
    imitate    0.05 * -log 3/4                     = 0.014384, whose gradient is 0.05 * (-1/4, 1/4)
    echo       their sum                           = -1.985616
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from golden.preference import Vector, gradients


class ImitateCase(NamedTuple):
    """M tokens of one row. `sampled` and `observed` are what each counts in the two terms, of which one is 0."""

    logits: np.ndarray
    targets: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    sampled: np.ndarray
    observed: np.ndarray
    temperature: float
    scale: float


def imitate(logits: np.ndarray, case: ImitateCase) -> Any:
    """The mean negative log-likelihood of the observed tokens (ECHO, arXiv 2605.24517: L_env), times `scale`."""
    chosen = logits[np.arange(len(case.targets)), case.targets]
    likelihood = chosen - np.log(np.sum(np.exp(logits), axis=1))
    return -case.scale * np.sum(case.observed * likelihood) / np.sum(case.observed)


def policy(logits: np.ndarray, case: ImitateCase) -> Any:
    """The mean over the sampled tokens of -ratio * advantage, no ratio being clipped (arXiv 2402.03300, equation 3)."""
    heated = logits / case.temperature
    chosen = heated[np.arange(len(case.targets)), case.targets]
    ratio = np.exp(chosen - np.log(np.sum(np.exp(heated), axis=1)) - case.behaviour)
    return -np.sum(case.sampled * ratio * case.advantages) / np.sum(case.sampled)


def echo(logits: np.ndarray, case: ImitateCase) -> Any:
    """Both (ECHO, arXiv 2605.24517: L_GRPO + lambda * L_env)."""
    return policy(logits, case) + imitate(logits, case)


REFERENCES: Mapping[str, Callable[[np.ndarray, ImitateCase], Any]] = {"imitate": imitate, "echo": echo}
"""loss(logits, case)."""


def draw(seed: int, *, tokens: int = 8, vocabulary: int = 7) -> ImitateCase:
    """A case of random numbers: two turns with an answer between them, one token of which counts half."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1.5, (tokens, vocabulary))
    targets = generator.integers(0, vocabulary, tokens)
    heated = logits / 0.75  # a float32 number, so that no framework need round it
    behaviour = (heated - np.log(np.exp(heated).sum(1, keepdims=True)))[np.arange(tokens), targets]
    observed = np.array([0.0, 0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0])[:tokens]
    return ImitateCase(
        logits=logits,
        targets=targets,
        behaviour=behaviour + generator.normal(0, 0.02, tokens),  # inside of every clip
        advantages=generator.normal(size=tokens),
        sampled=np.array([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0])[:tokens],
        observed=observed,
        temperature=0.75,
        scale=0.05,
    )


def hand() -> ImitateCase:
    """The worked example of this page."""
    return ImitateCase(
        logits=np.log(np.array([[3.0, 1.0], [3.0, 1.0]])),
        targets=np.array([0, 0]),
        behaviour=np.log(np.array([0.9, 1.0])),
        advantages=np.array([2.0, 0.0]),
        sampled=np.array([1.0, 0.0]),
        observed=np.array([0.0, 1.0]),
        temperature=0.5,
        scale=0.05,
    )


def vectors(seeds: int = 3) -> list[Vector]:
    """Of every name and seed: the inputs, the loss and its gradient by the logits [M, V]."""
    result = []
    for name, reference in REFERENCES.items():
        for case in map(draw, range(seeds)):
            (gradient,) = gradients(lambda inputs, case=case, of=reference: of(inputs[0], case), [case.logits])
            settings = {"temperature": case.temperature, "scale": case.scale}
            inputs = {key: value.tolist() for key, value in case._asdict().items() if isinstance(value, np.ndarray)}
            result.append(
                Vector(name, settings, inputs, float(reference(case.logits, case)), {"logits": gradient.tolist()})
            )
    return result
