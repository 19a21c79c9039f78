"""Rollouts as plain data for the viewer, with run-length coded token values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.batch.flatten import flatten
from sparring.protocols import Credit
from sparring.types import POLICY, Group, Rollout, Score, Segment, Trajectory

Advantages = Mapping[tuple[str, int], Sequence[float | None]]
"""(trajectory id, segment index) -> one advantage per token, None for an untrained token."""


def members(group: Group) -> list[tuple[Rollout, Score | None]]:
    """Return the rollouts of a group with their scores, then the failed rollouts, each with None."""
    return [*zip(group.rollouts, group.scores, strict=True), *((rollout, None) for rollout in group.failed)]


def group_advantages(group: Group, credit: Credit) -> Advantages:
    """Return the advantage of each sampled token of a training group; {} for a filtered group.

    The result is right for credit rules that look at one group at a time, such as GRPO.
    """
    if any(rollout.purpose != "train" for rollout in group.rollouts):
        return {}
    [rows] = credit.credit([group], [flatten(group, POLICY)])
    branches = {
        f"{trajectory.id}#{number}": (trajectory.id, branch)
        for rollout in group.rollouts
        for trajectory in rollout.trajectories
        for number, branch in enumerate(trajectory.branches())
    }
    advantages: dict[tuple[str, int], list[float | None]] = {}
    for row in rows:
        trajectory, branch = branches[row.id]
        start = 0
        for segment in branch:
            span = slice(start, start + len(segment.tokens))
            start = span.stop
            if row.advantages is not None and any(row.weights["policy"][span]):
                weights = row.weights["policy"][span]
                values = row.advantages[span]
                advantages[trajectory, segment.index] = [a if w else None for a, w in zip(values, weights, strict=True)]
    return advantages


def group_entries(group: Group, picks: Sequence[str], stage: str, advantages: Advantages) -> list[dict[str, Any]]:
    """Return the rollouts of a group to show: the best, the worst and at most two failed ones."""
    ranked = sorted(zip(group.rollouts, group.scores, strict=True), key=lambda pair: pair[1].reward or 0.0)
    chosen: list[tuple[Rollout, Score | None]] = [*ranked[:1], *ranked[1:][-1:]]
    chosen += [(rollout, None) for rollout in group.failed[:2]]
    return [entry(group, rollout, score, stage, advantages) | {"picks": list(picks)} for rollout, score in chosen]


def entry(group: Group, rollout: Rollout, score: Score | None, stage: str, advantages: Advantages) -> dict[str, Any]:
    """Return one rollout of a group with all its tokens."""
    failure = rollout.outcome.failure
    return summary(rollout, score) | {
        "stage": stage,
        "group": group.id,
        "of": len(group.rollouts) + len(group.failed),
        "version": group.version,
        "failure": failure and {"error": failure.error, "where": failure.where, "message": failure.message},
        "segments": [_segment(t, s, advantages) for t in rollout.trajectories for s in t.segments],
    }


def summary(rollout: Rollout, score: Score | None) -> dict[str, Any]:
    """Return a rollout's entry in lists."""
    outcome = rollout.outcome
    return {
        "id": rollout.id,
        "index": rollout.index,
        "task": rollout.task.id,
        "tag": rollout.task.tag,
        "reward": score.reward if score else None,
        "success": score.success if score else None,
        "outcome": outcome.kind,
        "reason": outcome.reason,
        "turns": sum(t.usage.turns for t in rollout.trajectories),
        "sampled": sum(t.usage.sampled_tokens for t in rollout.trajectories),
        "wall_s": round(sum(t.timing.wall_s for t in rollout.trajectories), 4),
        "parts": dict(score.parts) if score else {},
    }


def _segment(trajectory: Trajectory, segment: Segment, advantages: Advantages) -> dict[str, Any]:
    values = advantages.get((trajectory.id, segment.index))
    logprobs = segment.logprobs
    return {
        "index": segment.index,
        "parent": segment.parent,
        "role": trajectory.role,
        "source": segment.source,
        "label": segment.label if segment.model is not None else None,
        "fork": segment.fork and {"reason": segment.fork.reason, "of": segment.fork.of, "agent": segment.fork.agent},
        "quotes": list(segment.quotes),
        "message_role": segment.message.role if segment.message else None,
        "tokens": list(segment.tokens),
        "logprobs": None if logprobs is None else [float(f"{value:.6g}") for value in logprobs],
        "versions": segment.versions and [*zip(segment.versions.lengths, segment.versions.values, strict=True)],
        "kv_versions": segment.kv_versions
        and [*zip(segment.kv_versions.lengths, segment.kv_versions.values, strict=True)],
        "advantages": None if values is None else _run_lengths(values),
    }


def _run_lengths(values: Sequence[float | None]) -> list[list[float | None]]:
    runs: list[list[Any]] = []
    for value in values:
        rounded = None if value is None else float(f"{value:.6g}")
        if runs and runs[-1][1] == rounded:
            runs[-1][0] += 1
        else:
            runs.append([1, rounded])
    return runs
