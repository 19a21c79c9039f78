"""Trajectory trees -> rows: one sample per branch, with each sampled token trained once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sparring.generation import KeptSets
from sparring.types import Group, Label, Rollout, Sample, Segment, Trajectory

Bias = tuple[tuple[int, float], ...]
"""Pairs of a token id and the value added to its logit."""


def flatten(group: Group, model: str) -> list[Sample]:
    """Return the rows of a group, one per branch, in the order of rollouts, roles and leaves, with id
    `<trajectory id>#<branch>`.

    A turn that `model` sampled has weight 1 in the first branch that contains it and 0 in all others (law 1). All other
    tokens are context, including auxiliary and lost replies. Branches without a weighted token are left out.

    Raises:
        ValueError: a rollout is not for training, a branch mixes temperatures, or a branch starts with a sampled token.
    """
    for rollout in group.rollouts:
        if rollout.purpose != "train":
            raise ValueError(f"group {group.id}: rollout {rollout.id} is for {rollout.purpose}, not for training")
    return [
        sample
        for rollout in group.rollouts
        for trajectory in rollout.trajectories
        for sample in _trajectory(group.id, trajectory, model)
    ]


def sampled_tokens(rollouts: Iterable[Rollout], model: str, label: Label | None = None) -> int:
    """Count the tokens that `model` sampled in these rollouts, each segment once. With `label`, count only tokens with
    this label."""
    return sum(
        len(segment.tokens)
        for rollout in rollouts
        for trajectory in rollout.trajectories
        for segment in trajectory.segments
        if segment.model == model and label in (None, segment.label)
    )


def _trajectory(group: str, trajectory: Trajectory, model: str) -> list[Sample]:
    claimed: set[int] = set()
    samples = []
    for number, branch in enumerate(trajectory.branches()):
        own = {s.index for s in branch if s.model == model and s.is_turn} - claimed
        if own:
            claimed |= own
            samples.append(_branch(f"{trajectory.id}#{number}", group, branch, own))
    return samples


def _branch(id: str, group: str, branch: Sequence[Segment], own: set[int]) -> Sample:
    tokens: list[int] = []
    weights: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    kv_versions: list[int] = []
    kept_sets: list[bytes] = []
    bias: list[Bias] = []
    for segment in branch:
        count = len(segment.tokens)
        kept_sets += segment.kept.rows if segment.kept and segment.index in own else (b"",) * count
        bias += _bias(segment) if segment.index in own else ((),) * count
        tokens += segment.tokens
        if segment.index in own:
            weights += [1.0] * count
            logprobs += segment.logprobs or ()
            versions += segment.versions.expand() if segment.versions else ()
            kv_versions += (segment.kv_versions or segment.versions).expand() if segment.versions else ()
        else:
            weights += [0.0] * count
            logprobs += [0.0] * count
            versions += [-1] * count
            kv_versions += [-1] * count
    return Sample(
        id=id,
        group=group,
        source="policy",
        tokens=tuple(tokens),
        weights={"policy": tuple(weights)},
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        kv_versions=tuple(kv_versions),
        temperature=_temperature(id, [s for s in branch if s.index in own]),
        kept=KeptSets(rows=tuple(kept_sets)) if any(kept_sets) else None,
        bias=tuple(bias) if any(bias) else None,
        fork=None if branch[0].fork is None else branch[0].fork.reason,
    )


def _bias(segment: Segment) -> Sequence[Bias]:
    """Return, for each token of a segment, the values added to the logits before the token was drawn (see
    `Sampling`)."""
    count, sampling = len(segment.tokens), segment.sampling
    if sampling is None:
        return ((),) * count
    without_stops = tuple((token, -math.inf) for token in sampling.stop) + sampling.logit_bias
    early = min(count, sampling.min_tokens)
    if sampling.constraint is None or sampling.temperature == 0:
        return (without_stops,) * early + (sampling.logit_bias,) * (count - early)
    # a constraint keeps a set of ids for each token, except inside the thought before it, which has no stop tokens
    rows = segment.kept.rows if segment.kept else (b"",) * count
    return tuple(sampling.logit_bias if row else without_stops for row in rows)


def _temperature(id: str, segments: Iterable[Segment]) -> float:
    temperatures = {segment.sampling.temperature if segment.sampling else 1.0 for segment in segments}
    if len(temperatures) != 1:
        raise ValueError(f"sample {id}: sampled at {sorted(temperatures)}, but one branch trains at one temperature")
    return temperatures.pop()
