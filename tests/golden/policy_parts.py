"""The parts of the policy loss by their equations: float64 NumPy, one function per name, written from the papers.

A function is handed the step's tokens and its settings. `now` may be complex: gradients are taken by a complex step
(Squire and Trapp 1998), so a comparison looks at real parts, and what has no gradient is computed from `at`, the same
numbers without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """All M tokens of an optimiser step, row after row; each field [M]."""

    now: Array
    """Log-probabilities, maybe complex."""
    at: Array
    """Their values."""
    anchor: Array
    before: Array
    behaviour: Array
    reference: Array
    entropy: Array
    advantages: Array
    turns: Array
    trajectories: Array


def each(step: Step, unit: str) -> list[Array]:
    """The places of every turn or trajectory of a step, or of every token."""
    numbers = {"token": np.arange(len(step.at)), "turn": step.turns, "sequence": step.trajectories}[unit]
    return [np.flatnonzero(numbers == number) for number in np.unique(numbers)]


def lesser(a: Array, b: Array) -> Array:
    """Elementwise the one of smaller real part."""
    return np.where(np.real(a) < np.real(b), a, b)


def greater(a: Array, b: Array) -> Array:
    """Elementwise the one of larger real part."""
    return np.where(np.real(a) > np.real(b), a, b)


# ratios: the logarithm per token, of log-probabilities `now`


def token(now: Array, step: Step, settings: Settings) -> Array:
    """pi / anchor (PPO, arXiv 1707.06347)."""
    return now - step.anchor


def sequence(now: Array, step: Step, settings: Settings) -> Array:
    """The geometric mean over a trajectory (GSPO, arXiv 2507.18071, equation 7; per token equation 14)."""
    result = np.zeros_like(now)
    for part in each(step, "sequence"):
        if settings.get("per_token"):
            result[part] = np.mean(step.at[part] - step.anchor[part]) + (now[part] - step.at[part])
        else:
            result[part] = np.mean(now[part] - step.anchor[part])
    return result


def turn(now: Array, step: Step, settings: Settings) -> Array:
    """The geometric mean over a turn."""
    result = np.zeros_like(now)
    for part in each(step, "turn"):
        if settings.get("per_token"):
            result[part] = np.mean(step.at[part] - step.anchor[part]) + (now[part] - step.at[part])
        else:
            result[part] = np.mean(now[part] - step.anchor[part])
    return result


def product(now: Array, step: Step, settings: Settings) -> Array:
    """The product over a trajectory."""
    result = np.zeros_like(now)
    for part in each(step, "sequence"):
        result[part] = np.sum(now[part] - step.anchor[part])
    return result


# gates: the loss per token, of the logarithm r of its ratio, and r0 the same without gradient


def none(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """- r A."""
    return -np.exp(r) * step.advantages


def clip(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """PPO, arXiv 1707.06347, equation 7; DAPO, arXiv 2503.14476, equation 8."""
    ratio, low, high = np.exp(r), 1 - settings.get("low", 0.2), 1 + settings.get("high", 0.28)
    clipped = lesser(greater(ratio, low), high)
    return -lesser(ratio * step.advantages, clipped * step.advantages)


def dual_clip(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 1912.09729, equation 5."""
    ratio, low, high = np.exp(r), 1 - settings.get("low", 0.2), 1 + settings.get("high", 0.2)
    clipped = lesser(greater(ratio, low), high)
    inner = lesser(ratio * step.advantages, clipped * step.advantages)
    floored = greater(inner, settings.get("bound", 3.0) * step.advantages)
    return -np.where(step.advantages < 0, floored, inner)


def cispo(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """MiniMax-M1, arXiv 2506.13585, equations 4 and 5."""
    weight = np.clip(np.exp(r0), 1 - settings.get("low", 1.0), 1 + settings.get("high", 0.28))
    return -weight * step.advantages * step.now


def sapo(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 2511.20347, equations 5 and 6: 4 / tau sigmoid(tau (r - 1)) A."""
    tau = np.where(step.advantages > 0, settings.get("tau_positive", 1.0), settings.get("tau_negative", 1.05))
    return -(4 / tau) / (1 + np.exp(-tau * (np.exp(r) - 1))) * step.advantages


def tv_mask(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """DPPO, arXiv 2602.04879, equations 12 and 13: the binary total variation."""
    away = np.where(step.advantages > 0, r0 > 0, r0 < 0)
    far = np.abs(np.exp(step.at) - np.exp(step.anchor)) > settings.get("above", 0.15)
    return -np.where(away & far, 0, np.exp(r) * step.advantages)


def kl_mask(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """DPPO, arXiv 2602.04879, equations 12 and 14: the binary KL divergence of the anchor from the policy."""
    now, then = np.exp(step.at), np.exp(step.anchor)
    rest = np.maximum(1 - then, 1e-300)
    far = then * np.log(then / now) + rest * np.log(rest / (1 - now)) > settings.get("above", 0.05)
    away = np.where(step.advantages > 0, r0 > 0, r0 < 0)
    return -np.where(away & far, 0, np.exp(r) * step.advantages)


def geometric(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """GMPO, arXiv 2507.20673, equation 4."""
    low, high = np.log(settings.get("low", 0.67032)), np.log(settings.get("high", 1.49182))
    clipped = np.where(step.advantages > 0, lesser(r, high), greater(r, low))
    result = np.zeros_like(r)
    for part in each(step, "sequence"):
        result[part] = -np.exp(np.mean(clipped[part])) * step.advantages[part]
    return result


def covariances(step: Step) -> Array:
    """arXiv 2505.22617, equation 10."""
    return (step.at - np.mean(step.at)) * (step.advantages - np.mean(step.advantages))


def clip_cov(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 2505.22617, equations 11 and 12, beside PPO's clip as in its code; which are drawn: see the rule's
    docstring."""
    cov, ratio = covariances(step), np.exp(r)
    within = lesser(greater(ratio, 1 - settings.get("clip_low", 1.0)), 1 + settings.get("clip_high", 1.0))
    surrogate = lesser(ratio * step.advantages, within * step.advantages)
    unclipped = np.real(surrogate) == np.real(ratio * step.advantages)
    band = unclipped & (cov >= settings.get("low", 1.0)) & (cov <= settings.get("high", 5.0))
    candidates = np.flatnonzero(band)
    drawn = ((candidates + 1) * 3**0.5 + np.abs(step.behaviour[candidates]) * 2**13) % 1
    count = max(1, int(settings.get("share", 0.0002) * len(cov)))
    stopped = candidates[np.argsort(drawn, kind="stable")[:count]]
    return -surrogate * ~np.isin(np.arange(len(cov)), stopped)


def kl_cov(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 2505.22617, equations 13 and 14, the divergence as in its code."""
    count = max(1, int(settings.get("share", 0.002) * len(r0)))
    chosen = np.argsort(-covariances(step), kind="stable")[:count]
    distance = np.where(r0 > 0, r, np.where(r0 < 0, -r, 0))
    loss = -np.exp(r) * step.advantages
    loss[chosen] = loss[chosen] + settings.get("coefficient", 1.0) * distance[chosen]
    return loss


def vespo(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 2602.10693, equation 20: e^lambda w^k e^(-lambda w) A grad log pi."""
    good, w = step.advantages > 0, np.exp(r0)
    k = np.where(good, settings.get("k_positive", 2.0), settings.get("k_negative", 3.0))
    rate = np.where(good, settings.get("lambda_positive", 3.0), settings.get("lambda_negative", 2.0))
    return -np.exp(rate) * w**k * np.exp(-rate * w) * step.advantages * step.now


def m2po(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 2510.01161, algorithm 1: of the tokens that a trust region is about (A > 0 and r > 1, or A < 0 and r < 1),
    the largest (log r)^2 go until the mean of the others is small."""
    outwards = ((step.advantages > 0) & (r0 > 0)) | ((step.advantages < 0) & (r0 < 0))
    inside, gone = np.flatnonzero(outwards).tolist(), np.zeros(len(r0), bool)
    while inside and np.mean(r0[inside] ** 2) > settings.get("bound", 0.04):
        largest = inside[int(np.argmax(r0[inside] ** 2))]
        inside.remove(largest)
        gone[largest] = True
    return -np.exp(r) * step.advantages * ~gone


def topr(r: Array, r0: Array, step: Step, settings: Settings) -> Array:
    """arXiv 2503.14286, equations 7 and 8."""
    weight = np.where(step.advantages < 0, np.minimum(np.exp(r0), settings.get("bound", 1.0)), 1.0)
    return -weight * step.advantages * step.now


# corrections: the weight per token


def weigh(step: Step, settings: Settings) -> Array:
    """exp of the sum of d over a unit (of its mean over the trajectory), d = log(before / behaviour), bounded; 1
    without weights."""
    kind, weights = settings.get("weight", "none"), np.ones(len(step.at))
    d = (step.at if settings.get("compare") == "now" else step.before) - step.behaviour
    if kind == "none":
        return weights
    for part in each(step, "sequence" if kind == "geometric" else kind):
        weights[part] = np.exp(np.mean(d[part]) if kind == "geometric" else np.sum(d[part]))
    low, high = settings.get("low", 0.0), settings.get("high", 2.0)
    if settings.get("bound", "truncate") == "truncate":
        return np.minimum(weights, high)
    if settings["bound"] == "none":
        return weights
    return np.where((weights < low) | (weights > high), 0.0, weights)


def rejected(step: Step, settings: Settings) -> Array:
    """Return a mask [M] of the tokens whose unit has a divergence out of bounds."""
    gone, kind = np.zeros(len(step.at), bool), settings.get("reject", "none")
    if kind == "none":
        return gone
    by = {"mean": np.mean, "sum": np.sum, "max": np.max}[settings.get("reject_by", "mean")]
    trainer = step.at if settings.get("compare") == "now" else step.before
    divergence = {"k1": k1, "k2": k2, "k3": k3}[kind](step.behaviour, trainer)
    lowest = settings.get("reject_below")
    for part in each(step, settings.get("reject_unit", "sequence")):
        number = by(divergence[part])
        gone[part] = number > settings.get("reject_above", 0.01) or (lowest is not None and number < lowest)
    return gone & (step.advantages < 0) if settings.get("only_negative") else gone


def correction(weights: Array, gone: Array, settings: Settings) -> Array:
    """Weights, of which those of rejected tokens are 0; normalised by their mean."""
    weights = weights * (1 - gone)
    if settings.get("normalise") and np.mean(weights) != 0:
        weights = weights / np.mean(weights)
    return np.ones(len(weights)) if settings.get("metrics_only") else weights


# divergences per token of log-probabilities p from q (http://joschu.net/blog/kl-approx.html)


def k1(p: Array, q: Array) -> Array:
    """log(p / q)."""
    return p - q


def k2(p: Array, q: Array) -> Array:
    """log(p / q)^2 / 2."""
    return (p - q) ** 2 / 2


def k3(p: Array, q: Array) -> Array:
    """r - 1 - log r with r = q / p."""
    return np.exp(q - p) - 1 - (q - p)


def absolute(p: Array, q: Array) -> Array:
    """|log(p / q)|."""
    return greater(p - q, q - p)


# aggregations: the sum of losses per token


def token_mean(losses: Array, step: Step, max_tokens: int) -> Any:
    """DAPO, arXiv 2503.14476, equation 8."""
    return np.sum(losses) / len(losses)


def sequence_mean(losses: Array, step: Step, max_tokens: int) -> Any:
    """GRPO, arXiv 2402.03300, equation 3."""
    names = np.unique(step.trajectories)
    return sum(np.sum(losses[step.trajectories == name]) / np.sum(step.trajectories == name) for name in names) / len(
        names
    )


def sequence_sum(losses: Array, step: Step, max_tokens: int) -> Any:
    """LUSPO, arXiv 2602.05261, equation 7: each sequence's loss times its length, over the number of sequences."""
    return np.sum(losses) / len(np.unique(step.trajectories))


def constant(losses: Array, step: Step, max_tokens: int) -> Any:
    """Dr. GRPO, arXiv 2503.20783, section 3.2."""
    return np.sum(losses) / (len(np.unique(step.trajectories)) * max_tokens)


# anchors: what the ratio is to


def behaviour(step: Step, share: Array) -> Array:
    """Return the engine's log-probabilities."""
    return step.behaviour


def proximal(step: Step, share: Array) -> Array:
    """The trainer's before the update (arXiv 2505.24298, equation 5)."""
    return step.before


def loglinear(step: Step, share: Array) -> Array:
    """The way from recorded to current."""
    return step.behaviour + share * (step.at - step.behaviour)


PARTS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "ratio": {f.__name__: f for f in (token, sequence, turn, product)},
    "gate": {
        f.__name__: f
        for f in (none, clip, dual_clip, cispo, sapo, tv_mask, kl_mask, geometric, clip_cov, kl_cov, vespo, m2po, topr)
    },
    "correction": {f.__name__: f for f in (weigh, rejected, correction)},
    "kl": {"k2": k2, "k3": k3, "abs": absolute},
    "aggregation": {f.__name__: f for f in (token_mean, sequence_mean, sequence_sum, constant)},
    "anchor": {f.__name__: f for f in (behaviour, proximal, loglinear)},
}
"""The reference of every name, by part."""
