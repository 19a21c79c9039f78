"""Metrics of a step's rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sparring.observe.metrics import Metrics
from sparring.observe.survival import lost_rollouts, silent_rollouts, turns
from sparring.record.order import tools_of
from sparring.render.tags import CALL_TAGS
from sparring.rollout.step_estimates import AdmittedRollouts, sampled_tokens
from sparring.types import UNTRAINED, Group, Rollout, Segment, alike

WARNED_ABOVE: Mapping[str, tuple[float, str]] = {
    "nothing_to_train": (0.25, "of rollouts have nothing to train: they broke, or the policy has no turn in them"),
    "unread_calls": (0.1, "of replies to requests with tools hold a call's tag and no call that can be read"),
    "cut_by_context": (0.1, "of replies were cut because the context was full"),
    "cut_by_limit": (0.1, "of replies were cut; a cut answer counts as empty: raise rollout.sampling.max_turn_tokens"),
    "equal_rewards": (0.99, "of groups have equal rewards and teach nothing: vary tasks, raise rollout.group_size"),
}
"""Shares that cause a warning, once: the threshold, and the words of the warning."""

Shares = Mapping[str, tuple[float, float]]
"""Shares by name, each as numerator and denominator."""


class Warnings:
    """Warnings about the metrics of steps or evaluations, each given once."""

    def __init__(self, report: Callable[[str], None], prefix: str = "rollout/") -> None:
        self._report, self._prefix = report, prefix
        self._warned: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Warn about metrics that exceed their threshold for the first time."""
        for short, (most, words) in WARNED_ABOVE.items():
            name = f"{self._prefix}{short}"
            if name not in self._warned and metrics.get(name, 0.0) > most:
                self._warned.add(name)
                self._report(f"{name}: {metrics[name]:.0%} {words} (above {most:.0%}; said once)")


def measure(metrics: Metrics, group: Group, *, lag: int, max_context: int | None = None) -> None:
    """Add the metrics of one group.

    `infra_failure_rate` is the share of attempts that the infrastructure or a judge broke. `left_rate` is the share of
    rollouts that finally left their group for such a failure, and `silent_rate` the share that left it because a limit
    ended them before the policy's first turn. `world_share` is the share of the rollouts' wall-clock time that was
    spent in the world.

    Args:
        lag: lag of the group in optimiser steps when it is trained.
        max_context: maximum number of tokens of a prompt and its reply together; None if it is unknown.
    """
    metrics.add("rollout/lag_mean", lag)
    metrics.add("rollout/lag_max", lag, "max")
    metrics.add("rollout/groups", 1, "sum")
    silent, lost = len(silent_rollouts(group)), len(lost_rollouts(group))
    attempts, broke = len(group.rollouts) + len(group.failed), [r for r in group.failed if not r.outcome.trainable]
    metrics.add("rollout/infra_failure_rate", len(broke), "ratio", weight=attempts)
    rollouts = lost + silent + len(group.rollouts)
    metrics.add("rollout/left_rate", lost, "ratio", weight=rollouts)
    metrics.add("rollout/silent_rate", silent, "ratio", weight=rollouts)
    for name, (count, of) in shortfalls(group, max_context).items():
        metrics.add(f"rollout/{name}", count, "ratio", weight=of)
    if len(group.scores) > 1:
        roles = {trajectory.role for rollout in group.rollouts for trajectory in rollout.trajectories}
        equal = all(alike([score.of(role) for score in group.scores]) for role in roles)
        metrics.add("rollout/equal_rewards", equal)
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


def shortfalls(group: Group, max_context: int | None = None) -> Shares:
    """Return the shares of a group's rollouts and replies that fell short: rollouts with nothing to train, replies with
    an unreadable call, and replies that the context length or another limit on tokens cut. The result depends only on
    the record.

    Args:
        max_context: maximum number of tokens as in `measure`; without it, no share of the context length is returned,
            and all replies that were cut count as cut by a limit.
    """
    lost, silent = len(lost_rollouts(group)), len(silent_rollouts(group))
    untrained = sum(not any(trajectory.turns for trajectory in rollout.trajectories) for rollout in group.rollouts)
    unread = called = cut = full = replies = 0
    for trajectory in (trajectory for rollout in group.rollouts for trajectory in rollout.trajectories):
        segments, lengths = trajectory.segments, [0] * len(trajectory.segments)
        for segment in segments:
            before = 0 if segment.parent is None else lengths[segment.parent]
            lengths[segment.index] = before + len(segment.tokens)
        sampled = [segment for segment in segments if segment.model is not None]
        with_tools = [segment for segment in sampled if tools_of(segments, segment.index)]
        called, unread = called + len(with_tools), unread + sum(map(_is_unread, with_tools))
        replies += len(sampled)
        at = [lengths[segment.index] for segment in sampled if segment.finish_reason == "length"]
        cut, full = cut + len(at), full + sum(length >= (max_context or math.inf) for length in at)
    shares = {
        "nothing_to_train": (lost + silent + untrained, lost + silent + len(group.rollouts)),
        "unread_calls": (unread, called),
        "cut_by_limit": (cut - full, replies),
    }
    return shares if max_context is None else {**shares, "cut_by_context": (full, replies)}


def admitted_metrics(admitted: AdmittedRollouts) -> dict[str, float]:
    """Return estimates about the admitted rollouts and their differences from the trainable ones: length, success and
    domains. Unknown estimates are left out."""
    values = {
        "rollout/admitted_tokens_mean": admitted.admitted_tokens(),
        "rollout/length_bias": admitted.length_bias(),
        "rollout/admitted_success": admitted.admitted_success(),
        "rollout/success_bias": admitted.success_bias(),
        **{f"rollout/domain_bias/{name}": bias for name, bias in admitted.domain_bias().items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def _measure_rollout(metrics: Metrics, rollout: Rollout) -> None:
    tokens = sampled_tokens(rollout)
    metrics.add("rollout/tokens_mean", tokens)
    metrics.add("rollout/tokens", tokens, "sum")
    for label in UNTRAINED:
        count = sum(len(s.tokens) for t in rollout.trajectories for s in t.segments if s.label == label)
        metrics.add(f"rollout/{label}_tokens", count, "sum")
    metrics.add("rollout/branches", sum(1 for t in rollout.trajectories for _ in t.leaves()))
    others = sum(s.fork is not None and s.fork.reason == "tools" for t in rollout.trajectories for s in t.segments)
    metrics.add("rollout/branches_of_other_tools", others)
    metrics.add("rollout/turns", turns(rollout))
    metrics.add("rollout/tool_calls", sum(t.usage.tool_calls for t in rollout.trajectories))
    ended = rollout.outcome.kind
    for kind in ("completed", "truncated", "policy_failed"):
        metrics.add(f"rollout/{kind}", float(ended == kind))
    wall_s = rollout.trajectories[0].timing.wall_s
    metrics.add("rollout/wall_s_mean", wall_s)
    metrics.add("rollout/wall_s_max", wall_s, "max")
    metrics.add("rollout/world_share", rollout.trajectories[0].timing.world_s, "ratio", weight=wall_s)


def _is_unread(reply: Segment) -> bool:
    """Return whether a reply contains an incomplete or malformed call and no readable one."""
    if reply.message is None or any(call.arguments is not None for call in reply.message.tool_calls):
        return False
    return bool(reply.message.tool_calls) or any(tag in reply.message.content for tag in CALL_TAGS)


class HarnessEnds:
    """Counter of failures of harnesses and programs, and of calls that did not run; the first of each kind is reported.

    Args:
        report: called with a sentence for the user.
    """

    def __init__(self, metrics: Metrics, report: Callable[[str], None]) -> None:
        self._metrics, self._report = metrics, report
        self._reported: set[str] = set()

    def take(self, kind: str, name: str, data: Mapping[str, Any]) -> None:
        """Count an event of an attempt, with the arguments of `phases.EventRecorder`."""
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
    """Return the failure in an event: the error that a harness raised, or a program's exit status and last line of
    output."""
    if "error" in data:
        return f"a limit ended it, and behind that its harness raised: {data['error']}"
    last = (data["stderr"].strip() or data["stdout"].strip()).splitlines()
    return f"{data['harness']} ended with status {data['exit_code']}{f': {last[-1]}' if last else ''}"
