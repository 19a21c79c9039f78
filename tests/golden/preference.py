"""References of the preference losses: float64 NumPy, one function per name, each the paper's equation and nothing
else.

Gradients are taken by a complex step (Squire and Trapp 1998): imag(f(x + ih)) / h has no cancellation, so that they are
right to the last digits.

Worked example, by hand. One pair. The chosen reply has two tokens of log-probability -0.5 and -0.7, under the reference
-0.8 and -0.8; the rejected one has one token of -2.0, under the reference -1.6. Log-ratios are -1.2 + 1.6 = 0.4 and
-2.0 + 1.6 = -0.4:

    dpo, beta 0.5          margin 0.5 * 0.8 = 0.4                           -log sigmoid(0.4)       = 0.5130153
    dpo, smoothing 0.1     0.9 * 0.5130153 + 0.1 * 0.9130153                                        = 0.5530153
    robust_dpo, rate 0.1   (0.9 * 0.5130153 - 0.1 * 0.9130153) / 0.8                                = 0.4630153
    ipo, beta 0.5          (0.8 - 1)^2                                                              = 0.04
    ipo, averaged          (0.2 + 0.4 - 1)^2                                                        = 0.16
    simpo, 2, gamma 0.5    margin 2 * (-0.6 + 2.0) = 2.8                    -log sigmoid(2.3)       = 0.0955455
    orpo, strength 0.5     log odds of exp(-0.6) and exp(-2): 0.1958705 and -1.8545866;
                           -0.5 log sigmoid(2.0504569) = 0.0605227
    kto, beta 0.5          z of one mismatched row of log-ratio 0.2: values sigmoid(0.5 * 0.2) and sigmoid(0.5 * 0.6);
                           mean of 1 - 0.5249792 and 1 - 0.5744425                                  = 0.4502891
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Tokens = np.ndarray
"""Log-probabilities of the tokens of one reply."""


class ScoredReply(NamedTuple):
    """Log-probabilities of a reply's tokens under the policy and under the reference."""

    policy: Tokens
    reference: Tokens


class Pair(NamedTuple):
    """Two replies to one prompt."""

    chosen: ScoredReply
    rejected: ScoredReply


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + np.exp(-x))


def dpo(pairs: Sequence[Pair], *, beta: float = 0.1, label_smoothing: float = 0.0) -> Any:
    """arXiv 2305.18290, equation 7; with smoothing, the mean over labels that are right with 1 - label_smoothing."""
    losses = []
    for chosen, rejected in pairs:
        for_chosen = beta * np.sum(chosen.policy - chosen.reference)
        for_rejected = beta * np.sum(rejected.policy - rejected.reference)
        right = -np.log(sigmoid(for_chosen - for_rejected))
        wrong = -np.log(sigmoid(for_rejected - for_chosen))
        losses.append((1.0 - label_smoothing) * right + label_smoothing * wrong)
    return np.mean(losses)


def robust_dpo(pairs: Sequence[Pair], *, beta: float = 0.1, flip_rate: float = 0.1) -> Any:
    """arXiv 2403.00409: the loss whose mean over flipped labels is DPO's."""
    losses = []
    for chosen, rejected in pairs:
        margin = beta * (np.sum(chosen.policy - chosen.reference) - np.sum(rejected.policy - rejected.reference))
        right, wrong = -np.log(sigmoid(margin)), -np.log(sigmoid(-margin))
        losses.append(((1.0 - flip_rate) * right - flip_rate * wrong) / (1.0 - 2.0 * flip_rate))
    return np.mean(losses)


def ipo(pairs: Sequence[Pair], *, beta: float = 0.1, length_averaged: bool = False) -> Any:
    """arXiv 2310.12036, equation 17, beta for tau."""
    of_reply = np.mean if length_averaged else np.sum
    losses = []
    for chosen, rejected in pairs:
        h = of_reply(chosen.policy - chosen.reference) - of_reply(rejected.policy - rejected.reference)
        losses.append((h - 1.0 / (2.0 * beta)) ** 2)
    return np.mean(losses)


def simpo(pairs: Sequence[Pair], *, beta: float = 2.0, gamma: float = 1.0) -> Any:
    """arXiv 2405.14734, equation 6."""
    losses = []
    for chosen, rejected in pairs:
        of_chosen = beta / len(chosen.policy) * np.sum(chosen.policy)
        of_rejected = beta / len(rejected.policy) * np.sum(rejected.policy)
        losses.append(-np.log(sigmoid(of_chosen - of_rejected - gamma)))
    return np.mean(losses)


def orpo(pairs: Sequence[Pair], *, strength: float = 0.1) -> Any:
    """arXiv 2403.07691, equations 3, 4, 5 and 7: the odds ratio's part alone."""
    losses = []
    for chosen, rejected in pairs:
        likely = np.exp(np.mean(chosen.policy))
        unlikely = np.exp(np.mean(rejected.policy))
        ratio = likely / (1.0 - likely) / (unlikely / (1.0 - unlikely))
        losses.append(-strength * np.log(sigmoid(np.log(ratio))))
    return np.mean(losses)


def kto(
    wanted: Sequence[ScoredReply],
    unwanted: Sequence[ScoredReply],
    mismatched: Sequence[ScoredReply],
    *,
    beta: float = 0.1,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> Any:
    """arXiv 2402.01306, equation 8. The reference point z has no gradient: its imaginary part is dropped."""
    z = max(0.0, float(np.real(np.mean([np.sum(reply.policy - reply.reference) for reply in mismatched]))))
    losses = []
    for policy, reference in wanted:
        losses.append(desirable - desirable * sigmoid(beta * (np.sum(policy - reference) - z)))
    for policy, reference in unwanted:
        losses.append(undesirable - undesirable * sigmoid(beta * (z - np.sum(policy - reference))))
    return np.mean(losses)


def bradley_terry(chosen: np.ndarray, rejected: np.ndarray, margins: np.ndarray, *, centre: float = 0.0) -> Any:
    """arXiv 2203.02155, equation 1, of rewards; margins as arXiv 2307.09288, equation 2; centre as arXiv 2312.09244."""
    return np.mean(-np.log(sigmoid(chosen - rejected - margins)) + centre * (chosen + rejected) ** 2)


def step_labels(values: np.ndarray, labels: np.ndarray) -> Any:
    """Cross-entropy of the steps' labels (arXiv 2305.20050): p is the probability that a step is right."""
    p = sigmoid(values)
    return np.mean(-labels * np.log(p) - (1.0 - labels) * np.log(1.0 - p))


def gradients(loss: Callable[[list[np.ndarray]], Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The gradient of `loss(inputs)` for every input, by complex steps."""
    step, result = 1e-30, []
    for place, values in enumerate(inputs):
        gradient = np.zeros(np.shape(values))
        for at in np.ndindex(gradient.shape):
            moved = [np.array(v, dtype=complex) for v in inputs]
            moved[place][at] += 1j * step
            gradient[at] = np.imag(loss(moved)) / step
        result.append(gradient)
    return result


def draw_replies(generator: np.random.Generator, count: int) -> list[ScoredReply]:
    """Replies of one to seven tokens."""
    lengths = generator.integers(1, 8, count)
    return [ScoredReply(-generator.exponential(0.9, n), -generator.exponential(1.1, n)) for n in lengths]


PAIRWISE: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "dpo": (dpo, [{"beta": 0.3}, {"beta": 0.5, "label_smoothing": 0.15}]),
    "robust_dpo": (robust_dpo, [{"beta": 0.3, "flip_rate": 0.2}]),
    "ipo": (ipo, [{"beta": 0.25}, {"beta": 0.25, "length_averaged": True}]),
    "simpo": (simpo, [{"beta": 2.5, "gamma": 0.8}]),
    "orpo": (orpo, [{"strength": 0.7}]),
}
"""By name, the reference and the settings of its vectors."""


class Vector(NamedTuple):
    """Inputs of one loss by name, its settings, its value, and its gradient for the inputs named in `gradients`."""

    name: str
    settings: dict[str, Any]
    inputs: dict[str, list[Any]]
    loss: float
    gradients: dict[str, list[Any]]


def token_vectors(
    name: str, reference: Callable[[np.ndarray, Any], Any], cases: Iterable[tuple[Any, dict[str, Any]]]
) -> list[Vector]:
    """Of every case, a named tuple of inputs whose `logprob` [M] the loss is differentiated by, and its settings,
    one."""
    result = []
    for case, settings in cases:
        (gradient,) = gradients(lambda inputs, case=case: reference(inputs[0], case), [case.logprob])
        inputs = {key: values.tolist() for key, values in case._asdict().items() if isinstance(values, np.ndarray)}
        result.append(
            Vector(name, settings, inputs, float(reference(case.logprob, case)), {"logprob": gradient.tolist()})
        )
    return result


def vectors(seed: int = 0, count: int = 5) -> list[Vector]:
    """Of every name and setting one. Inputs are log-probabilities per reply and token, (policy, reference), or
    rewards."""
    generator = np.random.default_rng(seed)
    result = []
    for name, (reference, settings) in PAIRWISE.items():
        for setting in settings:
            sides = {side: draw_replies(generator, count) for side in ("chosen", "rejected")}
            result.append(_of_replies(name, setting, sides, partial(_paired, reference, setting)))
    sides = {side: draw_replies(generator, count) for side in ("wanted", "unwanted", "mismatched")}
    setting = {"beta": 0.4, "desirable": 1.3, "undesirable": 0.7}
    result.append(_of_replies("kto", setting, sides, lambda *replies: kto(*replies, **setting)))
    chosen, rejected, margins, values = generator.normal(size=(4, count))
    setting = {"centre": 0.1}
    inputs = {"chosen": chosen, "rejected": rejected, "margins": margins}
    result.append(_of_values("bradley_terry", setting, inputs, 2, lambda *of: bradley_terry(*of, **setting)))
    inputs = {"values": values, "labels": generator.random(count)}
    result.append(_of_values("step_labels", {}, inputs, 1, step_labels))
    return result


def _paired(
    reference: Callable[..., Any],
    setting: dict[str, Any],
    chosen: Sequence[ScoredReply],
    rejected: Sequence[ScoredReply],
) -> Any:
    return reference([Pair(*both) for both in zip(chosen, rejected, strict=True)], **setting)


def _of_replies(
    name: str, setting: dict[str, Any], sides: dict[str, list[ScoredReply]], loss: Callable[..., Any]
) -> Vector:
    """Of a loss of several lists of replies."""
    flat = [reply for side in sides.values() for reply in side]
    bounds = np.cumsum([0, *map(len, sides.values())]).tolist()

    def of(policy: list[np.ndarray]) -> Any:
        """The loss where the replies' tokens have these log-probabilities."""
        replies = [ScoredReply(tokens, reply.reference) for tokens, reply in zip(policy, flat, strict=True)]
        return loss(*(replies[begin:end] for begin, end in pairwise(bounds)))

    policy = [reply.policy for reply in flat]
    slopes = [gradient.tolist() for gradient in gradients(of, policy)]
    inputs = {
        side: [[reply.policy.tolist(), reply.reference.tolist()] for reply in of_side]
        for side, of_side in sides.items()
    }
    parts = {side: slopes[begin:end] for side, (begin, end) in zip(sides, pairwise(bounds), strict=True)}
    return Vector(name, setting, inputs, float(of(policy)), parts)


def _of_values(
    name: str, setting: dict[str, Any], arrays: dict[str, np.ndarray], moved: int, loss: Callable[..., Any]
) -> Vector:
    """Of a loss of arrays, the first `moved` of which have gradients."""
    values = list(arrays.values())
    slopes = gradients(lambda of: loss(*of, *values[moved:]), values[:moved])
    inputs = {key: value.tolist() for key, value in arrays.items()}
    parts = {key: gradient.tolist() for key, gradient in zip(arrays, slopes, strict=False)}
    return Vector(name, setting, inputs, float(loss(*values)), parts)
