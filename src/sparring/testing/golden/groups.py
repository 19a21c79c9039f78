"""Scored groups as plain data, drawn at random, and as our nouns.

A group is {"members": [...], "failed": [...], "baselines": [...]}. `failed` are rewards of members that an
infrastructure failure took out, which nothing may look at; `baselines` are rewards of rollouts of the same task that
are not trained. A member is one trajectory:

    rollout, role   trajectories of one rollout differ in their role
    reward          of this role in this rollout
    turns           how many tokens each reply has, in the order of time
    follows         per reply, the reply whose context it goes on from; -1 is the prompt. A chat has -1, 0, 1, ...
    cut             whether a limit ended it, or absent
    said            members of equal `said` and `turns` sampled the same tokens
    per_turn        what of the reward each reply earned, or absent
    per_step        what of that each step earned, as [tokens of the reply up to its end, reward], or absent
    states          the state each reply was made in, or absent
    parts           the components of its rollout's reward by name, or absent
    tokens          by name, one value for each token of all replies in the order of time

A framework that knows no branches takes the cases whose `follows` are chats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparring.batch.flatten import flatten
from sparring.generation import Runs
from sparring.types import Group, Outcome, Rollout, Sample, Score, Segment, Task, Trajectory

Plain = dict[str, Any]
FIRST_TOKEN = 1000
_TASK = Task(id="task", env="golden", messages=())
_DONE = Outcome(kind="completed", reason="answered")
_CUT = Outcome(kind="truncated", reason="max_tokens")
_BROKEN = Outcome(kind="infra_failed", reason="failure")
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


def simple_group(
    rewards: Sequence[float], *, turns: Sequence[int] = (1,), lengths: Sequence[int] = (), **fields: Sequence[Any]
) -> Plain:
    """A group of chats of one role. Each has these `turns`, or one turn whose length is its own of `lengths`; `fields`
    give further fields of each member.
    """
    members = [
        {"rollout": at, "role": "policy", "reward": reward, "turns": [lengths[at]] if lengths else list(turns)}
        | {"follows": list(range(-1, len(turns) - 1)), "said": at, "tokens": {}}
        | {name: values[at] for name, values in fields.items()}
        for at, reward in enumerate(rewards)
    ]
    return {"members": members, "failed": [], "baselines": []}


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


def nouns(groups: Sequence[Plain]) -> tuple[list[Group], list[list[Sample]]]:
    """Groups and their flattened samples; the members' token values are annotations, `logprob` the recorded ones."""
    made = [_group(f"group-{at}", at, plain) for at, plain in enumerate(groups)]
    return made, [
        [_annotated(row, _values(plain, row)) for row in flatten(group, "policy")]
        for plain, group in zip(groups, made, strict=True)
    ]


def by_member(
    groups: Sequence[Plain], samples: Sequence[Sequence[Sample]], name: str = ""
) -> list[list[list[float]] | None]:
    """Collect the samples' values of each token of each member, in the order of time: their advantages, or the
    annotation `name`.

    Raises:
        AssertionError: a token has weight in no row or in several, or a token without weight has an advantage.
    """
    read: list[list[list[float]] | None] = []
    for at, (plain, rows) in enumerate(zip(groups, samples, strict=True)):
        if not rows:
            read.append(None)
            continue
        members: list[list[float]] = []
        for member in plain["members"]:
            by_token: dict[int, float] = {}
            for row in rows:
                if row.trajectory != _trajectory_id(f"group-{at}", member):
                    continue
                values = row.annotations[name] if name else row.advantages
                for token, weight, value in zip(row.tokens, row.weights["policy"], values or (), strict=True):
                    assert weight or not value, f"{row.id}: a value {value} without weight"
                    if weight:
                        assert token not in by_token, f"{row.id}: token {token} has weight twice"
                        by_token[token] = value
            members.append([by_token[token] for token in sorted(by_token)])
            assert len(by_token) == sum(member["turns"]), f"{member}: a token has no weight"
        read.append(members)
    return read


def _trajectory_id(group: str, member: Plain) -> str:
    return f"{group}/{member['rollout']}/{member['role']}"


def _first(member: Plain) -> int:
    return FIRST_TOKEN * (1 + member["said"])


def _group(id: str, index: int, plain: Plain) -> Group:
    by_rollout: dict[int, list[Plain]] = {}
    for member in plain["members"]:
        by_rollout.setdefault(member["rollout"], []).append(member)
    lost = {"role": "policy", "turns": [2], "follows": [-1], "said": 0}
    failed = [{**lost, "rollout": -1 - at} for at in range(len(plain["failed"]))]
    return Group(
        id=id,
        index=index,
        task=_TASK,
        rollouts=tuple(_rollout(id, roles, _DONE) for roles in by_rollout.values()),
        scores=tuple(_score(roles) for roles in by_rollout.values()),
        failed=tuple(_rollout(id, [member], _BROKEN) for member in failed),
        baselines=tuple(Score(reward=reward) for reward in plain["baselines"]),
    )


def _score(roles: Sequence[Plain]) -> Score:
    first = roles[0]
    return Score(
        reward=first["reward"],
        parts=first.get("parts", {}),
        per_turn=tuple(first["per_turn"]) if "per_turn" in first else None,
        per_step=tuple(tuple(map(tuple, of)) for of in first["per_step"]) if "per_step" in first else None,
        states=tuple(first["states"]) if "states" in first else None,
        per_role={member["role"]: member["reward"] for member in roles} if len(roles) > 1 else None,
    )


def _rollout(group: str, roles: Sequence[Plain], outcome: Outcome) -> Rollout:
    return Rollout(
        id=f"{group}/{roles[0]['rollout']}",
        task=_TASK,
        index=roles[0]["rollout"],
        attempt=0,
        purpose="train",
        trajectories=tuple(_trajectory(_trajectory_id(group, m), m, _CUT if m.get("cut") else outcome) for m in roles),
    )


def _trajectory(id: str, member: Plain, outcome: Outcome) -> Trajectory:
    segments = [Segment(index=0, parent=None, source="prompt", tokens=(1, 2))]
    replies: list[int] = []
    token = _first(member)
    for count, follows in zip(member["turns"], member["follows"], strict=True):
        parent = 0
        if follows >= 0:
            parent = len(segments)
            segments.append(Segment(index=parent, parent=replies[follows], source="tool", tokens=(3,)))
        replies.append(len(segments))
        segments.append(
            Segment(
                index=len(segments),
                parent=parent,
                source="policy",
                tokens=tuple(range(token, token + count)),
                model="policy",
                logprobs=(-1.0,) * count,
                versions=Runs.of(0, count),
            )
        )
        token += count
    return Trajectory(id=id, task=_TASK.id, role=member["role"], segments=tuple(segments), outcome=outcome)


def _values(plain: Plain, row: Sample) -> dict[str, dict[int, float]]:
    """By name, the value of each sampled token id of the row's member."""
    [member] = [m for m in plain["members"] if _trajectory_id(row.group, m) == row.trajectory]
    return {name: {_first(member) + at: value for at, value in enumerate(of)} for name, of in member["tokens"].items()}


def _annotated(row: Sample, values: Mapping[str, Mapping[int, float]]) -> Sample:
    trained = [token if weight else None for token, weight in zip(row.tokens, row.weights["policy"], strict=True)]
    spread = {name: tuple(0.0 if token is None else of[token] for token in trained) for name, of in values.items()}
    return replace(row, logprobs=spread.pop("logprob", row.logprobs), annotations=spread)
