"""References of the credit rules that give all tokens of a trajectory one advantage. NumPy, float64, from the papers'
equations.

A reference takes plain groups (see `groups`) and the rule's settings; it returns, per group, one array per member, or
None where the group leaves the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import Any

import numpy as np

from sparring.batch.plain_groups import Plain

Credited = list[list[np.ndarray] | None]
Reference = Callable[[Sequence[Plain], dict[str, Any]], Credited]
Values = np.ndarray | None


def total(member: Plain) -> float:
    """Sum a member's earnings: its reward, and the rewards of its tokens."""
    return member["reward"] + sum(member["tokens"].get("reward", []))


def spread(member: Plain, value: float) -> np.ndarray:
    """One value for each token."""
    return np.full(sum(member["turns"]), value)


def _per_role(groups: Sequence[Plain], rule: Callable[[list[Plain], np.ndarray], Values]) -> Credited:
    """Apply a rule to each role of each group: members and their rewards -> advantages, or None."""
    credited: Credited = []
    for group in groups:
        members = group["members"]
        values, credited_any = np.zeros(len(members)), False
        for role in {m["role"] for m in members}:
            at = [i for i, m in enumerate(members) if m["role"] == role]
            result = rule([members[i] for i in at], np.array([total(members[i]) for i in at]))
            if result is not None:
                values[at], credited_any = result, True
        credited.append([spread(m, v) for m, v in zip(members, values, strict=True)] if credited_any else None)
    return credited


def _whiten(x: np.ndarray, epsilon: float, lost: int) -> np.ndarray:
    return np.zeros_like(x) if np.ptp(x) == 0 else (x - x.mean()) / (x.std(ddof=lost) + epsilon)


def rloo(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1, 0, 0: the first is judged against (0 + 0) / 2, the others against (1 + 0) / 2: 1, -0.5, -0.5."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        n = len(r)
        return np.array([r[i] - np.delete(r, i).mean() for i in range(n)]) if n > 1 else None

    return _per_role(groups, rule)


def grpo(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 3, 1 with mean 2 and deviation sqrt(2): 1 / sqrt(2), -1 / sqrt(2). Without the deviation: 1, -1."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        if np.ptp(r) == 0:
            return np.zeros_like(r)
        scale = r.std(ddof=1) + settings.get("epsilon", 1e-6) if settings.get("normalise", True) else 1.0
        return (r - r.mean()) / scale

    return _per_role(groups, rule)


def remax(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1 and 0 where the greedy answer earns 0.75: 0.25, -0.75."""
    return [
        [spread(m, total(m) - np.mean(group["baselines"])) for m in group["members"]] if group["baselines"] else None
        for group in groups
    ]


def opo(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1 and 0 of 3 and 1 tokens: the baseline is (3 * 1 + 1 * 0) / 4 = 0.75: 0.25, -0.75."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        length = np.array([sum(m["turns"]) for m in members], dtype=float)
        return r - (length @ r) / length.sum() if len(r) > 1 else None

    return _per_role(groups, rule)


def gpg(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two groups of two, rewards 1, 0 and 1, 1: half say nothing, so alpha is 2: 2 * (1 - 0.5), 2 * (0 - 0.5), 0, 0."""
    roles = [(group["members"], role) for group in groups for role in {m["role"] for m in group["members"]}]
    by_role = [[total(m) for m in members if m["role"] == role] for members, role in roles]
    useful = sum(len(of) for of in by_role if max(of) > min(of))
    alpha = sum(map(len, by_role)) / useful if useful else 0.0

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        if len(r) < 2:
            return None
        if np.ptp(r) == 0:
            return np.zeros_like(r)
        scale = r.std(ddof=1) + settings.get("epsilon", 1e-6) if settings.get("divide") else 1.0
        return alpha * (r - r.mean()) / scale

    return _per_role(groups, rule)


def maxrl(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1, 0, 0, 0 with mean 0.25: (1 - 0.25) / 0.25 = 3, and -1 for each of the others."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        if len(r) < 2:
            return None
        return (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r)

    return _per_role(groups, rule)


def pass_at_k(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1, 0, 0 and k = 2: the only pair of failures of three pairs is {2, 3}, so R = 2 / 3, sigma = sqrt(2) / 3;
    of the two pairs a failure is in, one fails: A(+) = (1 / 3) / sigma = 1 / sqrt(2), A(-) = (1 / 3 - 1 / 2) / sigma =
    -1 / sqrt(8).
    """
    k = settings.get("k", 4)

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        n, m = len(r), int((r <= settings.get("solved_above", 0.5)).sum())
        if n < max(k, 2):
            return None
        reward = 1 - comb(m, k) / comb(n, k)
        sigma = np.sqrt(reward * (1 - reward))
        if sigma == 0:
            return np.zeros(n)
        failure = (1 - reward - comb(m - 1, k - 1) / comb(n - 1, k - 1)) / sigma
        return np.where(r > settings.get("solved_above", 0.5), (1 - reward) / sigma, failure)

    return _per_role(groups, rule)


def gdpo(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """One group of two, parts right = 1, 0 and short = 0, 10, weights 2 and 1: normalised, both are (1, -1) / sqrt(2)
    up to their sign, so the sums are (2 - 1) / sqrt(2) and its negative, of deviation 1: 1 / sqrt(2), -1 / sqrt(2).
    """
    epsilon = settings.get("epsilon", 1e-6)
    sums: dict[tuple[int, int], float] = {}
    for g, group in enumerate(groups):
        for role in {m["role"] for m in group["members"]}:
            at = [i for i, m in enumerate(group["members"]) if m["role"] == role]
            if len(at) < 2:
                continue
            s = np.zeros(len(at))
            for name, weight in settings["weights"].items():
                if not any(name in group["members"][i]["parts"] for i in at):
                    continue
                r = np.array([group["members"][i]["parts"].get(name, 0.0) for i in at])
                if np.ptp(r) > 0:
                    s += weight * (r - r.mean()) / (r.std(ddof=1) + epsilon)
            sums |= {(g, i): x for i, x in zip(at, s, strict=True)}
    normal = dict(zip(sums, _whiten(np.array([*sums.values()]), epsilon, 1), strict=True)) if sums else {}
    normalised = {g for g, _ in normal}
    return [
        [spread(m, normal.get((g, i), 0.0)) for i, m in enumerate(group["members"])] if g in normalised else None
        for g, group in enumerate(groups)
    ]


def rae(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Decay 0.5, one role, rewards 1 and 1: the average goes 0, 0.5, 0.75: 1 - 0.5 = 0.5 and 1 - 0.75 = 0.25."""
    decay, average = settings.get("decay", 0.95), dict[str, float]()
    credited: Credited = []
    for group in groups:
        of = []
        for m in group["members"]:
            average[m["role"]] = decay * average.get(m["role"], 0.0) + (1 - decay) * total(m)
            of.append(spread(m, total(m) - average[m["role"]]))
        credited.append(of)
    return credited


def hierarchical(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Two rollouts, proposers earn 1 and 0, the solvers of the first 1 and 0, of the second 0 and 0: proposers are
    judged against 0.5, solvers against 0.5 and 0 of their own rollout.
    """
    inside = settings.get("inside", ("solver",))
    credited: Credited = []
    for group in groups:
        of, alone = [], True
        for m in group["members"]:
            if m["role"].split("/")[0] in inside:
                beside = [p for p in group["members"] if p["rollout"] == m["rollout"]]
                peers = [total(p) for p in beside if p["role"].split("/")[0] == m["role"].split("/")[0]]
            else:
                peers = [total(p) for p in group["members"] if p["role"] == m["role"]]
            equal = max(peers) == min(peers)
            of.append(spread(m, 0.0 if equal else total(m) - np.mean(peers)))
            alone = alone and len(peers) == 1
        credited.append(None if alone else of)
    return credited


def raft(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 0.2, 0.9, 0.9: the first of the two best is imitated: 0, 1, 0."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        chosen = np.argsort(-r, kind="stable")[: settings.get("best", 1)]
        return np.isin(np.arange(len(r)), chosen).astype(float)

    return _per_role(groups, rule)


def raft_plus_plus(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1, 0, 1: 1, 0, 1."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        solved = r - settings.get("solved_above", 0.5) > 0
        return solved.astype(float) if solved.any() else None

    return _per_role(groups, rule)


def rejection(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1, 1, 0, 1, where the first two said the same: 1, 0, 0, 1."""

    def rule(members: list[Plain], r: np.ndarray) -> Values:
        solutions: list[tuple[int, list[int]]] = []
        taken = np.zeros(len(r))
        for i, m in enumerate(members):
            solution = (m["said"], m["turns"])
            solved = r[i] - settings.get("solved_above", 0.5) > 0
            if solved and solution not in solutions and len(solutions) < settings.get("at_most", len(r)):
                solutions.append(solution)
                taken[i] = 1
        return taken if solutions else None

    return _per_role(groups, rule)


def topr(groups: Sequence[Plain], settings: dict[str, Any]) -> Credited:
    """Rewards 1 and 0 with a baseline of 0.25: 0.75, -0.25."""
    return _per_role(groups, lambda members, r: r - settings.get("baseline", 0.0))
