"""Scored groups as plain data, and their conversion to the framework's types, for tests of credit rules.

A group is {"members": [...], "failed": [...], "baselines": [...]}. `failed` are rewards of rollouts lost to an
infrastructure failure, which no rule may read; `baselines` are rewards of baseline rollouts of the same task. A member
is one trajectory:

    rollout, role   trajectories of one rollout differ in their role
    reward          reward of this role in this rollout
    turns           number of tokens of each reply, in the order of time
    follows         per reply, the reply whose context it continues; -1 is the prompt. A chat has -1, 0, 1, ...
    cut             whether a limit ended it, or absent
    said            members of equal `said` and `turns` sampled the same tokens
    per_turn        share of the reward that each reply earned, or absent
    per_step        share that each step earned, as [tokens of the reply up to its end, reward], or absent
    states          state in which each reply was sampled, or absent
    parts           components of its rollout's reward by name, or absent
    tokens          by name, one value for each token of all replies in the order of time

A framework without branches uses only the cases in which `follows` describes a chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparring.annotations import Annotation
from sparring.batch.flatten import flatten
from sparring.generation import Runs
from sparring.types import Group, Outcome, Rollout, Sample, Score, Segment, Task, Trajectory

Plain = dict[str, Any]
FIRST_TOKEN = 1000
_TASK = Task(id="task", env="golden", messages=())
_DONE = Outcome(kind="completed", reason="answered")
_CUT = Outcome(kind="truncated", reason="max_tokens")
_BROKEN = Outcome(kind="infra_failed", reason="failure")


def simple_group(
    rewards: Sequence[float], *, turns: Sequence[int] = (1,), lengths: Sequence[int] = (), **fields: Sequence[Any]
) -> Plain:
    """Return a group of chats of one role. All chats have these `turns`; with `lengths`, each chat has one turn of its
    length instead. `fields` are further fields, one value for each member."""
    members = [
        {"rollout": at, "role": "policy", "reward": reward, "turns": [lengths[at]] if lengths else list(turns)}
        | {"follows": list(range(-1, len(turns) - 1)), "said": at, "tokens": {}}
        | {name: values[at] for name, values in fields.items()}
        for at, reward in enumerate(rewards)
    ]
    return {"members": members, "failed": [], "baselines": []}


def nouns(groups: Sequence[Plain]) -> tuple[list[Group], list[list[Sample]]]:
    """Return groups and their flattened samples. Token values of the members become annotations; `logprob` becomes the
    recorded log-probabilities."""
    made = [_group(f"group-{at}", at, plain) for at, plain in enumerate(groups)]
    return made, [
        [_annotated(row, _values(plain, row)) for row in flatten(group, "policy")]
        for plain, group in zip(groups, made, strict=True)
    ]


def by_member(
    groups: Sequence[Plain], samples: Sequence[Sequence[Sample]], name: Annotation | None = None
) -> list[list[list[float]] | None]:
    """Return the advantages, or the values of annotation `name`, of each member's tokens, in the order of time. Raises
    AssertionError if a token has weight in no row or in several, or a token without weight has an advantage."""
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
                values = row.annotations[name] if name is not None else row.advantages
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
    num_said: int = member["said"]
    return FIRST_TOKEN * (1 + num_said)


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
    """Return, by name of a token value, the value of each sampled token of the row's member, by token id."""
    [member] = [m for m in plain["members"] if _trajectory_id(row.group, m) == row.trajectory]
    return {name: {_first(member) + at: value for at, value in enumerate(of)} for name, of in member["tokens"].items()}


def _annotated(row: Sample, values: Mapping[str, Mapping[int, float]]) -> Sample:
    trained = [token if weight else None for token, weight in zip(row.tokens, row.weights["policy"], strict=True)]
    spread = {name: tuple(0.0 if token is None else of[token] for token in trained) for name, of in values.items()}
    logprobs = spread.pop("logprob", row.logprobs)
    return replace(
        row, logprobs=logprobs, annotations={Annotation[name.upper()]: column for name, column in spread.items()}
    )
