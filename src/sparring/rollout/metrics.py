"""Figures of the rollouts of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparring.observe.metrics import Metrics
from sparring.observe.survival import lost_rollouts, turns
from sparring.rollout.admitted import AdmittedRollouts, sampled_tokens
from sparring.types import UNTRAINED, Group, Rollout


def measure(metrics: Metrics, group: Group, *, lag: int) -> None:
    """Add one group's figures.

    `infra_failure_rate` is the share of attempts that infrastructure or judge broke, `left_rate` the share of rollouts
    that left their group for it in the end, `world_share` the part of the rollouts' own wall clock that was spent in
    the world.

    Args:
        metrics: where to.
        group: a scored group.
        lag: steps that it is behind when it is trained.
    """
    metrics.add("rollout/lag_mean", lag)
    metrics.add("rollout/lag_max", lag, "max")
    metrics.add("rollout/groups", 1, "sum")
    attempts = len(group.rollouts) + len(group.failed)
    metrics.add("rollout/infra_failure_rate", len(group.failed), "ratio", weight=attempts)
    lost = len(lost_rollouts(group))
    metrics.add("rollout/left_rate", lost, "ratio", weight=lost + len(group.rollouts))
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        _measure_rollout(metrics, rollout)
        metrics.add("rollout/reward", score.reward or 0.0)
        for role, reward in (score.per_role or {}).items():
            metrics.add(f"rollout/reward/{role}", reward)
        if score.success is not None:
            metrics.add("rollout/success", float(score.success))
            if group.task.tag:
                metrics.add(f"rollout/success/{group.task.tag}", float(score.success))
        for name, value in score.parts.items():
            metrics.add(f"rollout/part/{name}", value)


def admitted_metrics(admitted: AdmittedRollouts) -> dict[str, float]:
    """Return what is estimated of the rollouts that were admitted, and how those that can be trained differ from them:
    length, success, domains; each only where it is known."""
    values = {
        "rollout/admitted_tokens_mean": admitted.admitted_tokens(),
        "rollout/length_bias": admitted.length_bias(),
        "rollout/admitted_success": admitted.admitted_success(),
        "rollout/success_bias": admitted.success_bias(),
        **{f"rollout/domain_bias/{name}": bias for name, bias in admitted.domain_bias().items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def _measure_rollout(metrics: Metrics, rollout: Rollout) -> None:
    """Add the counts and times of one usable rollout."""
    tokens = sampled_tokens(rollout)
    metrics.add("rollout/tokens_mean", tokens)
    metrics.add("rollout/tokens", tokens, "sum")
    for label in UNTRAINED:
        count = sum(len(s.tokens) for t in rollout.trajectories for s in t.segments if s.label == label)
        metrics.add(f"rollout/{label}_tokens", count, "sum")
    metrics.add("rollout/branches", sum(1 for t in rollout.trajectories for _ in t.leaves()))
    metrics.add("rollout/turns", turns(rollout))
    metrics.add("rollout/tool_calls", sum(t.usage.tool_calls for t in rollout.trajectories))
    ended = rollout.outcome.kind
    for kind in ("completed", "truncated", "policy_failed"):
        metrics.add(f"rollout/{kind}", float(ended == kind))
    wall_s = rollout.trajectories[0].timing.wall_s
    metrics.add("rollout/wall_s_mean", wall_s)
    metrics.add("rollout/wall_s_max", wall_s, "max")
    metrics.add("rollout/world_share", rollout.trajectories[0].timing.world_s, "ratio", weight=wall_s)


class HarnessEnds:
    """Count of what harnesses and programs did wrong; the first of each kind is reported.

    Args:
        metrics: where to.
        report: takes a sentence for the user.
    """

    def __init__(self, metrics: Metrics, report: Callable[[str], None]) -> None:
        self._metrics, self._report = metrics, report
        self._reported: set[str] = set()

    def take(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        """Take an event of an attempt; see `phases.Recorded`."""
        if kind == "harness" or kind == "program" and data.get("failed"):
            self._count("rollout/harness_failed", 1, f"{name}: {_failure_in(data)}")
        if kind == "program" and "unsampled_calls" in data:
            number = data["unsampled_calls"]
            text = f"{name}: {number} calls of the world's tools that stand in no reply of the model did not run"
            self._count("rollout/unsampled_calls", number, f"{text} (rollout.calls_from_code)")

    def _count(self, metric: str, number: int, text: str) -> None:
        self._metrics.add(metric, number, "sum")
        if number and metric not in self._reported:
            self._reported.add(metric)
            self._report(f"{text}; {metric} counts more of these")


def _failure_in(data: Mapping[str, Any]) -> str:
    """Return what the note of a harness that raised, or of a program that ended with another status than 0, says."""
    if "error" in data:
        return f"a limit ended it, and behind that its harness raised: {data['error']}"
    last = (data["stderr"].strip() or data["stdout"].strip()).splitlines()
    return f"{data['harness']} ended with status {data['exit_code']}{f': {last[-1]}' if last else ''}"
