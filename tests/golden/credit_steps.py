"""References of the credit rules that tell tokens or turns of a trajectory apart; see `credit_outcome` for their form.

Where a rule works backwards through a sum, its reference adds the terms up one by one, as the equation is written.
What follows what is said by `order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from golden.credit_outcome import Credited, spread, total
from golden.order import (
    following,
    hanging,
    next_of,
    places,
    preceding,
    to_go,
    with_branches,
)

from sparring.batch.plain_groups import Plain


def rewards_of(member: Plain, discount: float) -> np.ndarray:
    """The reward of each token: its own, its steps' at their last tokens, what is left of its turn's at the turn's
    last, there also what hangs on it, and what is left of the outcome at every end."""
    r = np.array(member["tokens"].get("reward", [0.0] * sum(member["turns"])), dtype=float)
    per_turn = member.get("per_turn", [0.0] * len(member["turns"]))
    for end, earned in zip(np.cumsum(member["turns"]), per_turn, strict=True):
        r[end - 1] += earned
    for at, earned, last in _steps(member) if "per_step" in member else ():
        r[at - 1] += earned
        r[last - 1] -= earned
    return with_branches(member, r, member["turns"], discount, member["reward"] - sum(per_turn))


def _steps(member: Plain) -> list[tuple[int, float, int]]:
    """(tokens of all replies up to the step's end, reward, tokens up to the end of its reply) of each step; without
    steps a reply is one."""
    ends = np.cumsum(member["turns"]).tolist()
    if "per_step" not in member:
        return [(end, earned, end) for end, earned in zip(ends, member["per_turn"], strict=True)]
    begins = [0, *ends[:-1]]
    return [(b + at, r, end) for b, end, of in zip(begins, ends, member["per_step"], strict=True) for at, r in of]


def discounted(member: Plain, r: np.ndarray, discount: float) -> np.ndarray:
    """sum_n discount^n * r of the n-th token from each token on."""
    return to_go(r, discount, next_of(member, member["turns"]))


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
    return [[discounted(m, rewards_of(m, discount), discount) - baseline for m in group["members"]] for group in groups]


def reinforce_plus_plus(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two rollouts of one token with rewards 1 and 0: mean and deviation are 0.5: 1, -1."""
    returns = [[discounted(m, rewards_of(m, 1.0), 1.0) for m in group["members"]] for group in groups]
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
            of.append(discounted(m, _differences(m, settings), settings.get("discount", 1.0) * lam))
        credited.append(of)
    return whitened(credited, settings.get("epsilon", 1e-8)) if settings.get("whiten", True) else credited


def gae_returns(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """The critic's targets. In the example above, with lambda 1: 0.5 + 0.5 and 0.5 + 0.5, what was earned in the
    end."""
    decay = settings.get("discount", 1.0) * settings.get("lambda_value", 1.0)
    return [
        [discounted(m, _differences(m, settings), decay) + np.array(m["tokens"]["value"]) for m in group["members"]]
        for group in groups
    ]


def _differences(member: Plain, settings: dict[str, Any]) -> np.ndarray:
    v, discount = np.array(member["tokens"]["value"]), settings.get("discount", 1.0)
    after = np.array([0.0 if t is None else v[t] for t in next_of(member, member["turns"])])
    return rewards_of(member, discount) + discount * after - v


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
            r, discount, ones = np.array(m["per_turn"]), settings.get("discount", 0.95), [1] * len(m["turns"])
            r = with_branches(m, r, ones, discount, total(m) - r.sum())
            returns.append(to_go(r, discount, following(m)))
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
        earned = [dict(zip(places(m), m["per_turn"], strict=True)) for m in members]
        last = [dict(zip(places(m), following(m), strict=True)) for m in members]
        end = [max((p for p in of if len(p) == 1), default=None) for of in last]
        before = [{p: r for p, r in of.items() if p != at} for of, at in zip(earned, end, strict=True)]
        outcome = _normal(
            np.array([total(m) - sum(of.values()) for m, of in zip(members, before, strict=True)]), True, epsilon
        )
        of = []
        for i, (m, o) in enumerate(zip(members, outcome, strict=True)):
            a = np.full(len(m["turns"]), o)
            for k, place in enumerate(places(m)):
                if place in before[i]:
                    same = [j for j, other in enumerate(before) if place in other]
                    a[k] = _normal(np.array([before[j][place] for j in same]), True, epsilon)[same.index(i)]
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
            r = np.zeros(sum(m["turns"]))
            for end, _, _ in _steps(m):
                r[end - 1] += normal.pop(0)
            of.append(discounted(m, with_branches(m, r, m["turns"], 1.0, 0.0), 1.0))
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
                discount = settings.get("discount", 1.0)
                r = with_branches(m, _implied(m, settings) - baseline, m["turns"], discount, 0.0)
                values[i] = discounted(m, r, discount) + outcome
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
            a, own = np.zeros(sum(m["turns"])), _placed(m)
            for t, place in enumerate(own):
                reached = [p for p in same if place in _placed(p)]
                at = [_placed(p).index(place) for p in reached]
                g = np.array([_summed(p)[s] for p, s in zip(reached, at, strict=True)])
                w = np.array([_collected(p)[s] for p, s in zip(reached, at, strict=True)])
                if len(same) > 1 and len(reached) == 1:
                    a[t] = lonely * g[0]
                elif len(same) > 1 and np.ptp(g) > 0:
                    a[t] = _summed(m)[t] - ((w @ g) / w.sum() if w.sum() > 0 else 0.0)
            values.append(a)
        credited.append(values if compared else None)
    return credited


def _placed(member: Plain) -> list[tuple[int, ...]]:
    """Return the place of each token: that of its reply, counted in tokens."""
    count: dict[tuple[int, ...], int] = {}
    placed = []
    for length, place in zip(member["turns"], places(member), strict=True):
        first = count.get(place[:-1], 0)
        placed += [(*place[:-1], first + at) for at in range(length)]
        count[place[:-1]] = first + length
    return placed


def _summed(member: Plain) -> np.ndarray:
    return discounted(member, rewards_of(member, 1.0), 1.0)


def _collected(member: Plain) -> np.ndarray:
    """The sum of squared norms up to each token."""
    ends, before, on = np.cumsum(member["turns"]), preceding(member), hanging(member)
    norms = _norms(member)
    collected = np.zeros(len(norms))
    for at, length in enumerate(member["turns"]):
        first = on.get(at) if before[at] is None else before[at]
        earlier = 0.0 if first is None else collected[ends[first] - 1]
        own = slice(ends[at] - length, ends[at])
        collected[own] = earlier + np.cumsum(norms[own])
    return collected


def _norms(member: Plain) -> np.ndarray:
    tokens = member["tokens"]
    return 1 - 2 * np.exp(tokens["logprob"]) + np.array(tokens["probability_squares"])
