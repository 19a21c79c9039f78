"""Scored groups drawn at random, as plain data (see `sparring.batch.plain_groups`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparring.batch.plain_groups import Plain

_NAMES = ("reward", "value", "reference", "implicit", "logprob", "probability_squares")


def random_groups(
    seed: int, sizes: Sequence[int], *, rewards: Sequence[float] | None = None, roles: Sequence[str] = ("policy",)
) -> list[Plain]:
    """Groups of these sizes. Even-numbered members are chats, the others trees.

    Args:
        seed: of everything that is drawn.
        sizes: rollouts per group.
        rewards: what rewards are drawn from; from a normal distribution where that is None.
        roles: of each rollout. Only rollouts of one role have `per_turn` and `states`.
    """
    draw = np.random.default_rng(seed)
    groups = []
    for size in sizes:
        members = [_member(draw, rollout, role, rewards, len(roles) == 1) for rollout in range(size) for role in roles]
        for at, member in enumerate(members):  # parts belong to the rollout
            member["parts"] = members[at - at % len(roles)]["parts"]
        failed = draw.normal(size=int(draw.integers(0, 3))).tolist()
        groups.append({"members": members, "failed": failed, "baselines": [round(float(draw.normal()), 3)]})
    return groups


def _member(draw: np.random.Generator, rollout: int, role: str, rewards: Sequence[float] | None, alone: bool) -> Plain:
    turns = draw.integers(1, 5, size=int(draw.integers(1, 5))).tolist()
    tree = rollout % 2
    follows = [int(draw.integers(-1, at - 1)) if tree and at else at - 1 for at in range(len(turns))]
    logprobs = -draw.exponential(size=sum(turns))
    tokens: dict[str, list[float]] = {name: draw.normal(size=sum(turns)).round(3).tolist() for name in _NAMES[:4]}
    tokens["logprob"] = logprobs.round(3).tolist()
    chosen = np.exp(tokens["logprob"])
    tokens["probability_squares"] = (chosen**2 + draw.uniform(size=sum(turns)) * (1 - chosen) ** 2).tolist()
    member = {
        "rollout": rollout,
        "role": role,
        "reward": float(draw.choice(rewards)) if rewards is not None else round(float(draw.normal()), 3),
        "turns": turns,
        "follows": follows,
        "said": int(draw.integers(0, 2)),
        "cut": bool(draw.integers(0, 2)),
        "parts": {"right": round(float(draw.normal()), 3), "short": round(float(draw.normal()), 3)},
        "tokens": tokens,
    }
    if alone:
        member["per_turn"] = draw.normal(size=len(turns)).round(3).tolist()
        member["states"] = [[None, "door", "hall"][int(draw.integers(0, 3))] for _ in turns]
    return member


def with_tokens(groups: Sequence[Plain], names: Sequence[str]) -> list[Plain]:
    """The groups with these of their token values only."""
    return [
        {**group, "members": [{**m, "tokens": {name: m["tokens"][name] for name in names}} for m in group["members"]]}
        for group in groups
    ]


def with_steps(groups: Sequence[Plain], seed: int) -> list[Plain]:
    """The groups with replies in steps: one ends every other token, from the first or the second on, and some replies
    have none."""
    draw = np.random.default_rng(seed)
    stepped = []
    for group in groups:
        members = []
        for m in group["members"]:
            ends = [range(int(draw.integers(1, 4)), length + 1, 2) for length in m["turns"]]
            members.append({**m, "per_step": [[[end, round(float(draw.normal()), 3)] for end in of] for of in ends]})
        stepped.append({**group, "members": members})
    return stepped
