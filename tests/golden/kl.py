"""Golden vectors of the KL penalty beside its estimators (those are in `golden.policy`): the coefficient that adapts,
the divergence over the vocabulary, and the moving average that it may be to. Plain data (JSON) in and out.

    for case in cases("adaptive"):
        ...  # coefficient, target, gain, updates (per trajectory the sum of log(behaviour / reference)) -> coefficients
    for case in cases("full"):
        ...  # logits and reference [M, V], biases per token as {id: value}, kept ids per token, temperature,
        ...  # weights [M], denominator, coefficient -> loss and its gradient by the logits [M, V]
    for case in cases("average"):
        ...  # decay, start [P], weights after each update [n, P] -> averages after each [n, P]

Worked examples, by hand.

    adaptive   coefficient 0.2, target 6, gain 0.1: trajectories of 6 and 7.2 nats have a mean of 6.6, an error of 0.1,
               and give 0.2 * 1.01 = 0.202; trajectories of 60 nats give 0.2 * 1.02 = 0.204
    full       V = 3, one token, policy (3/8, 1/8, 1/2), reference (1/4, 1/4, 1/2):
                   3/8 log(3/2) + 1/8 log(1/2) + 0                                                      = 0.065406
               ids 0 and 1 kept, so that these are (3/4, 1/4) and (1/2, 1/2):
                   3/4 log(3/2) + 1/4 log(1/2)                                                          = 0.130812
               and its gradient by logit 0: 3/4 (log(3/2) - 0.130812)                                   = 0.205990
    average    decay 1/2, start 1, weights 3 and 5: 1/2 + 3/2 = 2, then 1 + 5/2 = 3.5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Plain = dict[str, Any]


def adaptive(coefficient: float, target: float, gain: float, updates: Sequence[Sequence[float]]) -> list[float]:
    """The coefficient of every update and of the one after the last (arXiv 1909.08593)."""
    now, coefficients = coefficient, [coefficient]
    for divergences in updates:
        error = np.clip((np.mean(divergences) - target) / target, -0.2, 0.2)
        now = float(now * (1 + gain * error))
        coefficients.append(now)
    return coefficients


def probabilities(
    logits: Array, biases: Sequence[Mapping[int, float]], kept: Sequence[Sequence[int]], heat: float
) -> Array:
    """Return the distribution of each token [M, V]: exp((logit + bias) / temperature) over what is kept, summing to
    1."""
    result = np.zeros_like(logits)
    for row, (of, added, ids) in enumerate(zip(logits, biases, kept, strict=True)):
        raised = of + np.array([added.get(token, 0.0) for token in range(len(of))])
        raised = np.exp(raised / heat)
        inside = np.isin(np.arange(len(of)), ids) if ids else np.ones(len(of), bool)
        result[row] = raised * inside / (raised * inside).sum()
    return result


def divergence(q: Array, p: Array) -> Array:
    """KL(q || p) [M] = sum q log(q / p), of which 0 log 0 is 0 (Kullback and Leibler 1951, equation 2.4)."""
    there = q > 0
    return np.where(there, q * np.log(np.where(there, q, 1.0) / np.where(there, p, 1.0)), 0.0).sum(1)


def slopes(q: Array, p: Array, heat: float) -> Array:
    """Its derivative by each logit of q [M, V]: q (log(q / p) - KL(q || p)) / temperature."""
    there = q > 0
    logs = np.log(np.where(there, q, 1.0) / np.where(there, p, 1.0))
    return np.where(there, q * (logs - divergence(q, p)[:, None]) / heat, 0.0)


PARTS: Mapping[str, Callable[..., Array]] = {f.__name__: f for f in (probabilities, divergence, slopes)}
"""Functions that `full` is composed of."""


def full(case: Plain, parts: Mapping[str, Callable[..., Array]] = PARTS) -> Plain:
    """The penalty of a case, coefficient * sum weight KL / denominator, and its gradient by the policy's logits.
    `parts`: other references to put in the place of ours."""
    settings, heat = (case["biases"], case["kept"], case["temperature"]), case["temperature"]
    q, p = (parts["probabilities"](np.array(case[name]), *settings) for name in ("logits", "reference"))
    scale = case["coefficient"] * np.array(case["weights"]) / case["denominator"]
    gradient = scale[:, None] * parts["slopes"](q, p, heat)
    return {"loss": float(scale @ parts["divergence"](q, p)), "gradient": gradient.tolist()}


def average(decay: float, start: Array, weights: Sequence[Array]) -> list[Array]:
    """The moving average after every update (WARP, arXiv 2406.16768, section 3.1; mu = 1 - decay)."""
    now, averages = start, []
    for update in weights:
        now = decay * now + (1 - decay) * update
        averages.append(now)
    return averages


def draw(seed: int, *, tokens: int = 6, vocabulary: int = 9) -> Plain:
    """A case of `full`, the same for a seed everywhere: some tokens from kept sets, some with biases, one of no weight;
    the last has its reference's own logits. All numbers are float32's."""
    random = np.random.default_rng(seed)
    logits, reference = (random.normal(0, 1.5, (tokens, vocabulary)).astype(np.float32) for _ in range(2))
    reference[-1] = logits[-1]
    sizes = [0, 4, 1, 0, 6, 3] * tokens
    kept = [sorted(random.choice(vocabulary, size, replace=False).tolist()) for size in sizes[:tokens]]
    biases: list[Plain] = [{} for _ in range(tokens)]
    biases[0], biases[1] = {2: 0.5, 5: -1.25}, {kept[1][0]: 1.5}
    return {
        "logits": logits.astype(float).tolist(),
        "reference": reference.astype(float).tolist(),
        "biases": biases,
        "kept": kept,
        "temperature": 0.75,
        "weights": [1.0, 1.0, 0.5, 0.0, 0.25, 1.0][:tokens],
        "denominator": 6.5,
        "coefficient": 0.3,
    }


def _adaptive() -> Iterator[Plain]:
    random = np.random.default_rng(7)
    for name, scale in (("near", 1.0), ("far", 20.0)):
        updates = [(scale * (6.0 + random.standard_normal(5))).tolist() for _ in range(6)]
        coefficients = adaptive(0.2, 6.0, 0.1, updates)
        inputs = {"coefficient": 0.2, "target": 6.0, "gain": 0.1, "updates": updates}
        yield {"part": "adaptive", "name": name, **inputs, "coefficients": coefficients}


def _full() -> Iterator[Plain]:
    for seed in range(3):
        case = draw(seed)
        plain = {**case, "biases": [{str(token): value for token, value in of.items()} for of in case["biases"]]}
        yield {"part": "full", "name": str(seed), **plain, **full(case)}


def _average() -> Iterator[Plain]:
    random = np.random.default_rng(11)
    for decay in (0.3, 0.5, 0.99):
        start, weights = random.standard_normal(5), random.standard_normal((7, 5))
        averages = np.array(average(decay, start, weights)).tolist()
        inputs = {"decay": decay, "start": start.tolist(), "weights": weights.tolist()}
        yield {"part": "average", "name": str(decay), **inputs, "averages": averages}


REFERENCES: Mapping[str, Callable[[], Iterator[Plain]]] = {"adaptive": _adaptive, "full": _full, "average": _average}
"""The golden cases of each name."""


def cases(name: str) -> Iterator[Plain]:
    """The golden cases of a name; see above.

    Raises:
        KeyError: there is no such name.
    """
    yield from REFERENCES[name]()
