"""Distillation by its equations: every name in float64 NumPy, written from the papers and not from our code.

M tokens, V vocabulary, K likeliest. p is the teacher's distribution, q the student's, both softmax(logits /
temperature).

Worked example, by hand. V = 2, temperature 1, one token of weight 1; p = (1/2, 1/2), q = (3/4, 1/4), and id 0 was
sampled with its probability of now:

    forward          1/2 log(2/3) + 1/2 log 2           = 0.143841
    reverse          3/4 log(3/2) + 1/4 log(1/2)        = 0.130812
    jensen_shannon   m = (5/8, 3/8), beta = 1/2:
                     1/2 (1/2 log(4/5) + 1/2 log(4/3)) + 1/2 (3/4 log(6/5) + 1/4 log(2/3))      = 0.033822
    top_k, K = 1     ids (0), p = 1/2 and a rest of 1/2: the same three, because nothing else was merged
    squared          (log 3/4 - log 1/2)^2 / 2          = 0.082201
    policy_gradient  1 * (log 3/4 - log 1/2)            = 0.405465, whose gradient is that number times grad log q(0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray

LEAST_REST = 2.0**-24
"""The least that is said to be left outside of the likeliest tokens."""


@dataclass(frozen=True, kw_only=True)
class DistillCase:
    """Input of a loss. All values are float32 numbers, so that no framework need round them."""

    logits: Array
    """[M, V], the student's."""
    teacher_logits: Array
    """[M, V]."""
    targets: Array
    """[M] int: the sampled ids."""
    behaviour: Array
    """[M]: log-probabilities recorded when they were sampled."""
    weights: Array
    """[M]."""
    denominator: float
    temperature: float
    top_k: int
    beta: float
    ratio_cap: float


def reverse(log_p: Array, log_q: Array, case: DistillCase) -> Array:
    """KL(q || p) [M] (MiniLLM, arXiv 2306.08543, equation 1)."""
    return (np.exp(log_q) * (log_q - log_p)).sum(1)


def forward(log_p: Array, log_q: Array, case: DistillCase) -> Array:
    """KL(p || q) [M] (Hinton et al., arXiv 1503.02531, section 2, without the teacher's own entropy)."""
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


def jensen_shannon(log_p: Array, log_q: Array, case: DistillCase) -> Array:
    """beta KL(p || m) + (1 - beta) KL(q || m) [M], m = beta p + (1 - beta) q (GKD, arXiv 2306.13649, section 2)."""
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.log(case.beta * p + (1 - case.beta) * q)
    return case.beta * (p * (log_p - log_m)).sum(1) + (1 - case.beta) * (q * (log_q - log_m)).sum(1)


def likeliest(case: DistillCase) -> tuple[Array, Array]:
    """The teacher's K likeliest ids [M, K] and their log-probabilities [M, K], rounded to float32 as they travel."""
    log_p = log_softmax(case.teacher_logits / case.temperature)
    ids = np.argsort(-log_p, axis=1, kind="stable")[:, : case.top_k]
    return ids, np.take_along_axis(log_p, ids, 1).astype(np.float32).astype(np.float64)


def teacher_logprobs(case: DistillCase) -> Array:
    """The teacher's log-probability of each sampled id [M], rounded to float32 as it travels."""
    log_p = log_softmax(case.teacher_logits / case.temperature)
    return log_p[np.arange(len(log_p)), case.targets].astype(np.float32).astype(np.float64)


def log_softmax(logits: Array) -> Array:
    """[M, V] float64."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _vocabulary(divergence: Callable[..., Array]) -> Callable[..., float]:
    def loss(logits: Array, case: DistillCase, at: Array) -> float:
        log_p, log_q = log_softmax(case.teacher_logits / case.temperature), log_softmax(logits / case.temperature)
        return float((case.weights * divergence(log_p, log_q, case)).sum() / case.denominator)

    return loss


def _top_k(divergence: Callable[..., Array]) -> Callable[..., float]:
    def merged(inside: Array, rest: Array) -> Array:
        return np.concatenate((inside, np.log(rest)[:, None]), 1)

    def loss(logits: Array, case: DistillCase, at: Array) -> float:
        ids, log_p = likeliest(case)
        q = np.exp(log_softmax(logits / case.temperature))
        top_q = np.take_along_axis(q, ids, 1)
        others = q.copy()
        np.put_along_axis(others, ids, 0.0, 1)
        log_p = merged(log_p, np.maximum(1 - np.exp(log_p).sum(1), LEAST_REST))
        divergences = divergence(log_p, merged(np.log(top_q), others.sum(1)), case)
        return float((case.weights * divergences).sum() / case.denominator)

    return loss


def _policy_gradient(logits: Array, case: DistillCase, at: Array) -> float:
    """Minus the surrogate of REINFORCE with advantages log p - log q and truncated importance weights, both as they are
    `at`."""
    chosen = np.arange(len(case.targets)), case.targets
    now, before = (log_softmax(values / case.temperature)[chosen] for values in (logits, at))
    truncation = np.minimum(1.0, case.ratio_cap / np.exp(before - case.behaviour))
    advantages = teacher_logprobs(case) - before
    return -float((case.weights * truncation * np.exp(now - case.behaviour) * advantages).sum() / case.denominator)


def _squared(logits: Array, case: DistillCase, at: Array) -> float:
    """Half the square of log q - log p of what was sampled (k2 of http://joschu.net/blog/kl-approx.html)."""
    now = log_softmax(logits / case.temperature)[np.arange(len(case.targets)), case.targets]
    return float((case.weights * (now - teacher_logprobs(case)) ** 2 / 2).sum() / case.denominator)


REFERENCES: Mapping[str, Callable[[Array, DistillCase, Array], float]] = {
    "token/policy_gradient": _policy_gradient,
    "token/squared": _squared,
    "top_k/reverse": _top_k(reverse),
    "top_k/forward": _top_k(forward),
    "top_k/jensen_shannon": _top_k(jensen_shannon),
    "vocabulary/reverse": _vocabulary(reverse),
    "vocabulary/forward": _vocabulary(forward),
    "vocabulary/jensen_shannon": _vocabulary(jensen_shannon),
}
"""loss(logits, case, at): of the student's logits [M, V]; `at` are those where what carries no gradient was taken."""


def value(name: str, case: DistillCase) -> float:
    """The loss."""
    return REFERENCES[name](case.logits, case, case.logits)


def gradient(name: str, case: DistillCase, step: float = 1e-3) -> Array:
    """Its gradient by the student's logits [M, V], by central differences of sixth order: an error of some 1e-14."""
    result = np.zeros_like(case.logits)
    for place in np.ndindex(*case.logits.shape):
        moved = {}
        for steps in (-3, -2, -1, 1, 2, 3):
            logits = case.logits.copy()
            logits[place] += steps * step
            moved[steps] = REFERENCES[name](logits, case, case.logits)
        differences = [moved[steps] - moved[-steps] for steps in (1, 2, 3)]
        result[place] = (45 * differences[0] - 9 * differences[1] + differences[2]) / (60 * step)
    return result


def case(seed: int = 0, *, tokens: int = 6, vocabulary: int = 9, top_k: int = 4) -> DistillCase:
    """A case of random numbers, the same for a seed everywhere; one token has no weight, one was sampled by older
    weights."""
    draw = np.random.Generator(np.random.PCG64(seed))

    def single(values: Array) -> Array:
        return values.astype(np.float32).astype(np.float64)

    logits, teacher = (single(draw.normal(0, 1.5, (tokens, vocabulary))) for _ in range(2))
    targets = draw.integers(0, vocabulary, tokens)
    behaviour = single(log_softmax(logits / 0.75)[np.arange(tokens), targets])
    behaviour[1] -= 1.25
    behaviour[2] += 0.5
    weights = np.array([1.0, 1.0, 0.5, 0.0] * tokens)[:tokens]
    return DistillCase(
        logits=logits,
        teacher_logits=teacher,
        targets=targets,
        behaviour=behaviour,
        weights=weights,
        denominator=float(weights.sum() + 2.0),  # other micro-batches have weights, too
        temperature=0.75,
        top_k=top_k,
        beta=0.25,
        ratio_cap=2.0,
    )


def hand() -> DistillCase:
    """The worked example of this page."""
    return DistillCase(
        logits=np.log(np.array([[3.0, 1.0]])),
        teacher_logits=np.zeros((1, 2)),
        targets=np.array([0]),
        behaviour=np.log(np.array([0.75])),
        weights=np.ones(1),
        denominator=1.0,
        temperature=1.0,
        top_k=1,
        beta=0.5,
        ratio_cap=2.0,
    )


def cases(name: str) -> Iterator[dict[str, Any]]:
    """Golden cases of a name as plain data: what is given, and the loss and its gradient by the student's logits.

    Raises:
        KeyError: there is no such name.
    """
    for seed in range(3):
        drawn = case(seed)
        inputs = {key: item.tolist() if isinstance(item, np.ndarray) else item for key, item in vars(drawn).items()}
        expected = {"loss": value(name, drawn), "gradient": gradient(name, drawn).tolist()}
        yield {"name": f"distill/{name}/{seed}", "case": inputs, "expected": expected}
