"""References of the credit rules that tell tokens or turns of a trajectory apart; see `credit_outcome` for their form.

Where a rule works backwards through a sum, its reference adds the terms up one by one, as the equation is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparring.testing.golden.credit_outcome import Credited, spread, total
from sparring.testing.golden.groups import Plain


def rewards_of(member: Plain) -> np.ndarray:
    """The reward of each token: its own, its steps' at their last tokens, what is left of its turn's at the turn's
    last, and what is left of the outcome at the last."""
    r = np.array(member["tokens"].get("reward", [0.0] * sum(member["turns"])), dtype=float)
    per_turn = member.get("per_turn", [0.0] * len(member["turns"]))
    for end, earned in zip(np.cumsum(member["turns"]), per_turn, strict=True):
        r[end - 1] += earned
    for at, earned, last in _steps(member) if "per_step" in member else ():
        r[at - 1] += earned
        r[last - 1] -= earned
    r[-1] += member["reward"] - sum(per_turn)
    return r


def _steps(member: Plain) -> list[tuple[int, float, int]]:
    """(tokens of all replies up to the step's end, reward, tokens up to the end of its reply) of each step; without
    steps a reply is one."""
    ends = np.cumsum(member["turns"]).tolist()
    if "per_step" not in member:
        return [(end, earned, end) for end, earned in zip(ends, member["per_turn"], strict=True)]
    begins = [0, *ends[:-1]]
    return [(b + at, r, end) for b, end, of in zip(begins, ends, member["per_step"], strict=True) for at, r in of]


def discounted(r: np.ndarray, discount: float) -> np.ndarray:
    """sum_{s >= t} discount^(s - t) * r_s for each t."""
    return np.array([sum(discount ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))])


def whitened(credited: Credited, epsilon: float) -> Credited:
    """Less the mean, over the deviation, of all tokens of the update."""
    pooled = [values for of in credited if of is not None for values in of]
    if not pooled:
        return credited
    x = np.concatenate(pooled)
    if np.ptp(x) == 0:
        return [None if of is None else [np.zeros_like(v) for v in of] for of in credited]
    return [None if of is None else [(v - x.mean()) / (x.std() + epsilon) for v in of] for of in credited]


def _normal(x: np.ndarray, divide: bool, epsilon: float) -> np.ndarray:
    if np.ptp(x) == 0:
        return np.zeros_like(x)
    return (x - x.mean()) / ((x.std(ddof=1) + epsilon) if divide else 1.0)


def _turns_to_tokens(member: Plain, values: np.ndarray) -> np.ndarray:
    return np.repeat(values, member["turns"])


def reinforce(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Token rewards 0, 0 and an outcome of 1, discount 0.5, baseline 0.25: returns 0.5, 1, so 0.25, 0.75."""
    discount, baseline = settings.get("discount", 1.0), settings.get("baseline", 0.0)
    return [[discounted(rewards_of(m), discount) - baseline for m in group["members"]] for group in groups]


def reinforce_plus_plus(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two rollouts of one token with rewards 1 and 0: mean and deviation are 0.5: 1, -1."""
    returns = [[discounted(rewards_of(m), 1.0) for m in group["members"]] for group in groups]
    x = np.concatenate([of for group in returns for of in group])
    scale = x.std() + settings.get("epsilon", 1e-8) if np.ptp(x) else np.inf
    return [[(of - x.mean()) / scale for of in group] for group in returns]


def reinforce_plus_plus_baseline(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 3, 1 and 5, 5, one token each: less their groups' means 1, -1, 0, 0, of deviation sqrt(1 / 2)."""
    plain: Credited = []
    for group in groups:
        of, alone = [], True
        for m in group["members"]:
            peers = [total(p) for p in group["members"] if p["role"] == m["role"]]
            equal = max(peers) == min(peers)
            of.append(spread(m, 0.0 if equal else total(m) - np.mean(peers)))
            alone = alone and len(peers) == 1
        plain.append(None if alone else of)
    return whitened(plain, settings.get("epsilon", 1e-8))


def gae(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two tokens, outcome 1, values 0.5 and 0.5, lambda 0.5, not whitened: the differences are 0 and 0.5, so 0 + 0.5 *
    0.5 = 0.25, and 0.5.
    """
    alpha = settings.get("length_alpha")
    credited: Credited = []
    for group in groups:
        of = []
        for m in group["members"]:
            lam = settings.get("lambda_policy", 0.95) if alpha is None else max(0.0, 1 - 1 / (alpha * sum(m["turns"])))
            of.append(discounted(_differences(m, settings), settings.get("discount", 1.0) * lam))
        credited.append(of)
    return whitened(credited, settings.get("epsilon", 1e-8)) if settings.get("whiten", True) else credited


def gae_returns(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """The critic's targets. In the example above, with lambda 1: 0.5 + 0.5 and 0.5 + 0.5, what was earned in the
    end."""
    decay = settings.get("discount", 1.0) * settings.get("lambda_value", 1.0)
    return [
        [discounted(_differences(m, settings), decay) + np.array(m["tokens"]["value"]) for m in group["members"]]
        for group in groups
    ]


def _differences(member: Plain, settings: dict[str, Any]) -> np.ndarray:
    v = np.array([*member["tokens"]["value"], 0.0])
    return rewards_of(member) + settings.get("discount", 1.0) * v[1:] - v[:-1]


def gigpo(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two members of two turns, rewards 1 and 0 earned at the end, discount 0.5, no division; first turns in the state
    "hall", last turns in none: episodes 0.5, -0.5; returns of the first turns 0.5, 0, so 0.25, -0.25: turns 0.75, 0.5
    and -0.75, -0.5.
    """
    divide, epsilon = settings.get("divide", True), settings.get("epsilon", 1e-6)
    credited: Credited = []
    for group in groups:
        members = group["members"]
        episode = _normal(np.array([total(m) for m in members]), divide, epsilon)
        returns, places = [], dict[str, list[tuple[int, int]]]()
        for i, m in enumerate(members):
            r = np.array(m["per_turn"])
            r[-1] += total(m) - r.sum()
            returns.append(discounted(r, settings.get("discount", 0.95)))
            for t, state in enumerate(m["states"]):
                if state is not None:
                    places.setdefault(state, []).append((i, t))
        steps = [np.zeros(len(m["turns"])) for m in members]
        for of in places.values():
            for (i, t), a in zip(of, _normal(np.array([returns[i][t] for i, t in of]), divide, epsilon), strict=True):
                steps[i][t] = a
        comparable = len(members) > 1 or any(len(of) > 1 for of in places.values())
        advantages = [e + settings.get("step_weight", 1.0) * s for e, s in zip(episode, steps, strict=True)]
        credited.append(
            [_turns_to_tokens(m, a) for m, a in zip(members, advantages, strict=True)] if comparable else None
        )
    return credited


def turn_level(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two members of two turns; first turns earn 1 and 0, last turns 0 and 2, nothing beside them, outcome_weight 0.5.
    Both pairs are (1, -1) / sqrt(2) up to their sign: first turns (1 - 0.5) / sqrt(2) and its negative, last turns -1 /
    sqrt(2), 1 / sqrt(2).
    """
    epsilon = settings.get("epsilon", 1e-6)
    credited: Credited = []
    for group in groups:
        members = group["members"]
        if len(members) < 2:
            credited.append(None)
            continue
        outcome = _normal(np.array([total(m) - sum(m["per_turn"][:-1]) for m in members]), True, epsilon)
        of = []
        for m, o in zip(members, outcome, strict=True):
            a = np.full(len(m["turns"]), o)
            for k in range(len(a) - 1):
                same = [p for p in members if len(p["turns"]) > k + 1]
                own = [p is m for p in same].index(True)
                a[k] = _normal(np.array([p["per_turn"][k] for p in same]), True, epsilon)[own]
                a[k] += settings.get("outcome_weight", 1.0) * o
            of.append(_turns_to_tokens(m, a))
        credited.append(of)
    return credited


def process(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """One member of two turns that earn 1 and 0: normalised 1 / sqrt(2), -1 / sqrt(2); the first turn has both to go,
    0, the second -1 / sqrt(2).
    """
    credited: Credited = []
    for group in groups:
        every = [r for m in group["members"] for _, r, _ in _steps(m)]
        if len(every) < 2:
            credited.append(None)
            continue
        scale = np.std(every, ddof=1) + settings.get("epsilon", 1e-6) if np.ptp(every) else np.inf
        normal = [(r - np.mean(every)) / scale for r in every]
        of = []
        for m in group["members"]:
            steps = [(end, normal.pop(0)) for end, _, _ in _steps(m)]
            of.append(np.array([sum(r for end, r in steps if end > t) for t in range(sum(m["turns"]))], dtype=float))
        credited.append(of)
    return credited


def prime(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """beta 1, two members of two tokens, implied rewards 1, 0 and 0, 0, outcomes 0 and 0. The first has means of others
    0: 1 + 0, 0; the second 0.5: -0.5 - 0.5, -0.5.
    """
    credited: Credited = []
    for group in groups:
        members = group["members"]
        values: list[np.ndarray] = [np.zeros(sum(m["turns"])) for m in members]
        roles = {m["role"] for m in members if sum(p["role"] == m["role"] for p in members) > 1}
        for i, m in enumerate(members):
            if m["role"] in roles:
                others = [p for j, p in enumerate(members) if j != i and p["role"] == m["role"]]
                baseline = np.mean([_implied(p, settings).mean() for p in others])
                outcome = total(m) - np.mean([total(p) for p in others])
                values[i] = discounted(_implied(m, settings) - baseline, settings.get("discount", 1.0)) + outcome
        credited.append(values if roles else None)
    return credited


def _implied(member: Plain, settings: dict[str, Any]) -> np.ndarray:
    return settings.get("beta", 0.05) * (
        np.array(member["tokens"]["implicit"]) - np.array(member["tokens"]["reference"])
    )


def optimal_token_baseline(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two members of one token, rewards 1 and 0, probabilities 0.5 and 0.25, sums of squares 0.5 and 0.5: squared norms
    0.5 and 1, so the baseline is 0.5 * 1 / 1.5 = 1 / 3: 2 / 3, -1 / 3. A second token of the first would be alone: 1.
    """
    lonely = 1 if settings.get("zero_tail", True) else 0
    credited: Credited = []
    for group in groups:
        values: list[np.ndarray] = []
        compared = False
        for m in group["members"]:
            same = [p for p in group["members"] if p["role"] == m["role"]]
            compared = compared or len(same) > 1
            a = np.zeros(sum(m["turns"]))
            for t in range(len(a)):
                reached = [p for p in same if sum(p["turns"]) > t]
                g = np.array([rewards_of(p)[t:].sum() for p in reached])
                w = np.array([_norms(p)[: t + 1].sum() for p in reached])
                if len(same) > 1 and len(reached) == 1:
                    a[t] = lonely * g[0]
                elif len(same) > 1 and np.ptp(g) > 0:
                    a[t] = rewards_of(m)[t:].sum() - ((w @ g) / w.sum() if w.sum() > 0 else 0.0)
            values.append(a)
        credited.append(values if compared else None)
    return credited


def _norms(member: Plain) -> np.ndarray:
    tokens = member["tokens"]
    return 1 - 2 * np.exp(tokens["logprob"]) + np.array(tokens["probability_squares"])
