"""Application of shaping rules: adds amounts to rewards, role by role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sparring.types import Group, Score, Trajectory

Amounts = Callable[[Sequence[Trajectory], Sequence[float]], Sequence[float]]
"""Shaping of one role of a group: its trajectories and their rewards -> the amount added to each."""


def sampled_tokens(trajectory: Trajectory) -> int:
    """Count the sampled tokens of a trajectory's turns, each once."""
    return sum(len(turn.tokens) for turn in trajectory.turns)


def sampled_turns(trajectory: Trajectory) -> int:
    """Count the sampled turns of a trajectory."""
    return len(trajectory.turns)


def shaped(group: Group, name: str, amounts: Amounts) -> Group:
    """Return the group with amounts added to rewards, role by role.

    In a rollout with one role the amount is added to `reward` and recorded as the part `name`; with several roles it is
    added to each `per_role` and recorded as `name/role`. Rewards of turns do not change: the amount is earned at the
    end of the rollout.
    """
    added: dict[str, float] = {}
    by_role: dict[str, list[tuple[Trajectory, float]]] = {}
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        for trajectory in rollout.trajectories:
            by_role.setdefault(trajectory.role, []).append((trajectory, score.of(trajectory.role) or 0.0))
    for members in by_role.values():
        trajectories = [trajectory for trajectory, _ in members]
        for trajectory, amount in zip(
            trajectories, amounts(trajectories, [reward for _, reward in members]), strict=True
        ):
            added[trajectory.id] = amount
    pairs = zip(group.rollouts, group.scores, strict=True)
    return replace(
        group, scores=tuple(_add_to_score(score, rollout.trajectories, added, name) for rollout, score in pairs)
    )


def _add_to_score(score: Score, trajectories: Sequence[Trajectory], added: dict[str, float], name: str) -> Score:
    if len(trajectories) == 1:
        [trajectory] = trajectories
        amount = added[trajectory.id]
        reward = (score.of(trajectory.role) or 0.0) + amount
        return replace(score, reward=reward, per_role=None, parts={**score.parts, name: amount})
    per_role = {t.role: (score.of(t.role) or 0.0) + added[t.id] for t in trajectories}
    parts = {f"{name}/{t.role}": added[t.id] for t in trajectories}
    return replace(score, per_role=per_role, parts={**score.parts, **parts})
