"""References of the preference losses: float64 NumPy, one function per name, each the paper's equation and nothing else.

    python -m sparring.testing.golden.preference > vectors.json

writes inputs, settings, losses and gradients for any other implementation to be held against. Gradients are taken by a complex
step (Squire and Trapp 1998): imag(f(x + ih)) / h has no cancellation, so that they are right to the last digits.

Worked example, by hand. One pair. The chosen reply has two tokens of log-probability -0.5 and -0.7, under the reference -0.8 and
-0.8; the rejected one has one token of -2.0, under the reference -1.6. Log-ratios are -1.2 + 1.6 = 0.4 and -2.0 + 1.6 = -0.4:

    dpo, beta 0.5          margin 0.5 * 0.8 = 0.4                           -log sigmoid(0.4)       = 0.5130153
    dpo, smoothing 0.1     0.9 * 0.5130153 + 0.1 * 0.9130153                                        = 0.5530153
    robust_dpo, rate 0.1   (0.9 * 0.5130153 - 0.1 * 0.9130153) / 0.8                                = 0.4630153
    ipo, beta 0.5          (0.8 - 1)^2                                                              = 0.04
    ipo, averaged          (0.2 + 0.4 - 1)^2                                                        = 0.16
    simpo, 2, gamma 0.5    margin 2 * (-0.6 + 2.0) = 2.8                    -log sigmoid(2.3)       = 0.0955455
    orpo, strength 0.5     log odds of exp(-0.6) and exp(-2): 0.1958705 and -1.8545866;   -0.5 log sigmoid(2.0504569) = 0.0605227
    kto, beta 0.5          z of one mismatched row of log-ratio 0.2: values sigmoid(0.5 * 0.2) and sigmoid(0.5 * 0.6);
                           mean of 1 - 0.5249792 and 1 - 0.5744425                                  = 0.4502891
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Tokens = np.ndarray
"""Log-probabilities of the tokens of one reply."""


class Reply(NamedTuple):
    """Log-probabilities of a reply's tokens under the policy and under the reference."""

    policy: Tokens
    reference: Tokens


class Pair(NamedTuple):
    """Two replies to one prompt."""

    chosen: Reply
    rejected: Reply


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
    wanted: Sequence[Reply],
    unwanted: Sequence[Reply],
    mismatched: Sequence[Reply],
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
    step, found = 1e-30, []
    for place, values in enumerate(inputs):
        gradient = np.zeros(len(values))
        for at in range(len(values)):
            moved = [np.array(v, dtype=complex) for v in inputs]
            moved[place][at] += 1j * step
            gradient[at] = np.imag(loss(moved)) / step
        found.append(gradient)
    return found


def draw_replies(generator: np.random.Generator, count: int) -> list[Reply]:
    """Replies of one to seven tokens."""
    lengths = generator.integers(1, 8, count)
    return [Reply(-generator.exponential(0.9, n), -generator.exponential(1.1, n)) for n in lengths]


PAIRWISE: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "dpo": (dpo, [{"beta": 0.3}, {"beta": 0.5, "label_smoothing": 0.15}]),
    "robust_dpo": (robust_dpo, [{"beta": 0.3, "flip_rate": 0.2}]),
    "ipo": (ipo, [{"beta": 0.25}, {"beta": 0.25, "length_averaged": True}]),
    "simpo": (simpo, [{"beta": 2.5, "gamma": 0.8}]),
    "orpo": (orpo, [{"strength": 0.7}]),
}
"""By name, the reference and the settings of its vectors."""


def vectors(seed: int = 0, count: int = 5) -> list[dict[str, Any]]:
    """Of every pairwise name and setting: the replies' log-probabilities, the loss and its gradient for each policy token."""
    generator = np.random.default_rng(seed)
    found = []
    for name, (reference, settings) in PAIRWISE.items():
        for setting in settings:
            both = [draw_replies(generator, count), draw_replies(generator, count)]
            policy = [reply.policy for side in both for reply in side]
            known = [reply.reference for side in both for reply in side]
            loss = functools.partial(_loss, reference, setting, known)
            found.append(
                {
                    "name": name,
                    "settings": setting,
                    "chosen": [[reply.policy.tolist(), reply.reference.tolist()] for reply in both[0]],
                    "rejected": [[reply.policy.tolist(), reply.reference.tolist()] for reply in both[1]],
                    "loss": float(loss(policy)),
                    "gradients": [gradient.tolist() for gradient in gradients(loss, policy)],
                }
            )
    return found


def _loss(reference: Callable[..., Any], setting: dict[str, Any], known: Sequence[Tokens], policy: Sequence[np.ndarray]) -> Any:
    """Of replies of which the first half are chosen, the second half rejected."""
    replies = [Reply(*both) for both in zip(policy, known, strict=True)]
    half = len(replies) // 2
    return reference([Pair(*both) for both in zip(replies[:half], replies[half:], strict=True)], **setting)


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
