"""Comparison of the records of two runs: the first event or token that differs.

Rollouts of equal asynchronous runs begin and end in any order, so times are ignored. Events are compared in the order
of training: step by step the admissions, the groups, their order in the update, and the published weights. Within a
group, rollouts are compared by index; within a rollout, the turns as recorded, then outcome and score. Seconds, cache
counts and broken attempts that were rebuilt are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, zip_longest
from typing import Any

from sparring.log import LogKind, step_name
from sparring.protocols import Store
from sparring.store.codec import encode
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, Trajectory

DIGEST_BYTES = 8
"""Number of bytes of each tensor's digest, in the log entry of a published version."""

TURN_FIELDS = ("parent", "source", "model", "finish_reason", "message", "label")
"""Compared fields of a turn, in addition to its tokens."""

OF_TIME = ("_s", "_ms")
"""Suffixes of metrics that measure time."""

PARTS = {"task": "task", "digest": "digest of the task's contents", "version": "version of the weights"}
"""Compared parts of an admission, in order, with their names. The number of groups observed before is not compared: if
it matters, the next task differs."""

COLUMNS = ("token", "log-probability", "version", "KV version", "kept set")
"""Values recorded for each token, in the order of comparison."""

LONGEST = 160
"""Maximum number of characters of a value in the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDifference:
    """First difference between two records.

    Attributes:
        where: event: a step, or a group, rollout and turn.
        what: part of the event that differs.
        values: text of this part in the first and in the second record.
        tensor: index of the first published tensor that differs, in the order of names; else None.
    """

    where: str
    what: str
    values: tuple[str, str]
    tensor: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEnd:
    """End of one record while the other continues; both are equal up to here.

    Attributes:
        record: 0 if the first record ends, 1 if the second does.
        after: last event of both, in words.
    """

    record: int
    after: str


Comparison = RecordDifference | RecordEnd | None
"""Result of a comparison; None if the records are equal and end together."""


def first_difference(left: Store, right: Store, stage: str, groups_per_step: int) -> Comparison:
    """Return the first difference between two records of a stage that trains on its own rollouts.

    Args:
        stage: `rl` or `distill`.
    """
    finished = tuple({step for step, _ in store.metrics(stage)} for store in (left, right))
    for step in count(1):
        span = range((step - 1) * groups_per_step, step * groups_per_step)
        end: RecordEnd | None = None
        over = False
        for kind, (first, second) in _events(left, right, stage, step, span):
            if first is not None and second is not None:
                if (difference := _difference(kind, f"{stage} step {step}", first, second)) is not None:
                    return difference
            elif first is not None or second is not None:
                missing = 0 if first is None else 1
                end = end or RecordEnd(record=missing, after=f"step {step - 1}")
            else:
                over = over or not all(step in steps for steps in finished)
        if end is not None or over:
            return end
    raise AssertionError("unreachable")


def first_group_difference(left: Store, right: Store, stage: str) -> Comparison:
    """Return the first difference between the groups, by index, of a stage without training, such as an evaluation.

    Args:
        stage: name under which the groups are recorded, such as `eval/rl`.
    """
    last = "the start"
    for first, second in zip_longest(left.groups(stage=stage), right.groups(stage=stage)):
        if first is None or second is None:
            return RecordEnd(record=0 if first is None else 1, after=last)
        if first.index != second.index:
            return RecordEnd(record=0 if first.index > second.index else 1, after=last)
        if (difference := _group_difference(stage, first, second)) is not None:
            return difference
        last = f"{first.id}"
    return None


def first_metric_difference(left: Store, right: Store, stage: str) -> Comparison:
    """Return the first difference between the metrics of a stage, step by step, apart from metrics of time."""
    for first, second in zip_longest(left.metrics(stage), right.metrics(stage)):
        if first is None or second is None:
            step = (first or second)[0]
            return RecordEnd(record=0 if first is None else 1, after=f"step {step - 1}")
        (step, metrics), (_, counterparts) = first, second
        for name in sorted(metrics.keys() | counterparts.keys()):
            if not name.endswith(OF_TIME) and not _equal(metrics.get(name), counterparts.get(name)):
                return _differs(f"{stage} step {step}", name, metrics.get(name), counterparts.get(name))
    return None


def _events(
    left: Store, right: Store, stage: str, step: int, span: range
) -> Iterator[tuple[str, tuple[Any | None, Any | None]]]:
    """Yield the events of a step from both records, with None for a missing one."""
    groups = [
        {g.index: g for g in store.groups(stage=stage, first=span[0], end=span[-1] + 1)} for store in (left, right)
    ]
    for index in span:
        yield f"admission of {stage}/{index}", (_admission(left, stage, index), _admission(right, stage, index))
    for index in span:
        yield "group", (groups[0].get(index), groups[1].get(index))
    name = step_name(stage, step)
    for kind in ("trained", "published"):
        yield kind, (_last(left, stage, name, kind), _last(right, stage, name, kind))


def _difference(event: str, where: str, first: Any, second: Any) -> RecordDifference | None:
    if event == "group":
        return _group_difference(where, first, second)
    if event == "published":
        return _published_difference(where, first, second)
    for key in first:
        if first[key] != second[key]:
            what = "order of training" if event == "trained" else f"{event}: {PARTS.get(key, key)}"
            return _differs(where, what, first[key], second[key])
    return None


def _admission(store: Store, stage: str, index: int) -> Mapping[str, Any] | None:
    data = _last(store, stage, f"{stage}/{index}", "admitted")
    return None if data is None else {part: data[part] for part in PARTS}


def _last(store: Store, stage: str, name: str, kind: LogKind) -> Mapping[str, Any] | None:
    """Return the data of the latest log entry of a kind about the id `name`."""
    entries = list(store.entries(stage, name=name, kinds=(kind,)))
    return entries[-1][1].data if entries else None


def _published_difference(where: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> RecordDifference | None:
    """Return how published weights differ: in the number of tensors, the first different tensor, or only the
    checksum."""
    if first["checksum"] == second["checksum"] and first["digests"] == second["digests"]:
        return None
    digests, counterparts = first["digests"], second["digests"]
    if len(digests) != len(counterparts):
        return _differs(
            where, "tensors that were published", *(len(p) // DIGEST_BYTES for p in (digests, counterparts))
        )
    places = range(0, len(digests), DIGEST_BYTES)
    tensor = next((at for at in places if digests[at:][:DIGEST_BYTES] != counterparts[at:][:DIGEST_BYTES]), None)
    return RecordDifference(
        where=where,
        what="checksum of the published weights",
        values=(first["checksum"], second["checksum"]),
        tensor=None if tensor is None else tensor // DIGEST_BYTES,
    )


def _group_difference(where: str, left: Group, right: Group) -> RecordDifference | None:
    """Return the first difference between two groups: of the task, of the rollouts by index, or of their scores.
    `where` is the event that they belong to, for the report."""
    where = f"{where}, {left.id}"
    if left.task.id != right.task.id:
        return _differs(where, "task", left.task.id, right.task.id)
    for field in fields(Task):
        contents = getattr(left.task, field.name), getattr(right.task, field.name)
        if not _equal(*contents):
            return _differs(where, f"task {left.task.id}: {field.name}", *contents)
    scores = (_scores(left), _scores(right))
    rollouts, counterparts = _by_place(left), _by_place(right)
    for place in sorted(rollouts.keys() | counterparts.keys()):
        at = f"{where}/{place}"
        first, second = rollouts.get(place), counterparts.get(place)
        if first is None or second is None:
            return _differs(at, "rollout", first and first.outcome.kind, second and second.outcome.kind)
        difference = _rollout_difference(at, first, second)
        difference = difference or _score_difference(at, *(of.get(place) for of in scores))
        if difference is not None:
            return difference
    for baseline, other in zip_longest(left.baselines, right.baselines):
        if (difference := _score_difference(f"{where}/baseline", baseline, other)) is not None:
            return difference
    return None


def _rollout_difference(where: str, left: Rollout, right: Rollout) -> RecordDifference | None:
    """Return the first difference between two rollouts: of their turns by role, or of their outcomes."""
    roles = [trajectory.role for trajectory in left.trajectories]
    if roles != (counterparts := [trajectory.role for trajectory in right.trajectories]):
        return _differs(where, "roles", ", ".join(roles), ", ".join(counterparts))
    for first, second in zip(left.trajectories, right.trajectories, strict=True):
        at = where if len(roles) == 1 else f"{where} role {first.role}"
        if (difference := _trajectory_difference(at, first, second)) is not None:
            return difference
    return None


def _trajectory_difference(where: str, left: Trajectory, right: Trajectory) -> RecordDifference | None:
    turn = 1
    for first, second in zip_longest(left.segments, right.segments):
        at = f"{where} turn {turn}"
        if first is None or second is None:
            parts = [part and f"{len(part.tokens)} tokens ({part.source})" for part in (first, second)]
            return _differs(at, "segment", *parts)
        if (difference := _segment_difference(at, first, second)) is not None:
            return difference
        turn += first.model is not None
    ends = [_end(trajectory.outcome) for trajectory in (left, right)]
    return None if ends[0] == ends[1] else _differs(where, "outcome", *ends)


def _end(outcome: Outcome) -> str:
    """Return kind, reason and class of failure. The failure's message is ignored: it may contain a process id or a
    time."""
    return f"{outcome.kind} ({outcome.reason}{f', {outcome.failure.error}' if outcome.failure else ''})"


def _segment_difference(where: str, left: Segment, right: Segment) -> RecordDifference | None:
    """Return the first difference between two segments: token by token with the values recorded for it, then in the
    other fields."""
    kind = "prompt token" if left.model is None else "sampled token"
    if not _equal(_columns(left), _columns(right)):
        columns = [(name, pair) for name, *pair in zip(COLUMNS, _columns(left), _columns(right), strict=True)]
        for place in range(max(len(left.tokens), len(right.tokens))):
            for name, pair in columns:
                first, second = (
                    None if values is None else next(iter(values[place : place + 1]), None) for values in pair
                )
                if not _equal(first, second):
                    what = f"{kind} {place}" if name == "token" else f"{name} of {kind} {place}"
                    return _differs(where, what, first, second)
    for name in TURN_FIELDS:
        first, second = getattr(left, name), getattr(right, name)
        if first != second:
            return _differs(where, name.replace("_", " "), first, second)
    return None


def _columns(segment: Segment) -> tuple[Sequence[Any] | None, ...]:
    """Return the values of `COLUMNS` for every token; None for unrecorded ones."""
    runs = (segment.versions, segment.kv_versions)
    versions, kv_versions = (None if row is None else row.expand() for row in runs)
    kept = None if segment.kept is None else segment.kept.rows
    return (segment.tokens, segment.logprobs, versions, kv_versions, kept)


def _score_difference(where: str, left: Score | None, right: Score | None) -> RecordDifference | None:
    """Return the first difference between two scores, field by field; None stands for a missing score."""
    if left is None or right is None:
        return None if left is right else _differs(where, "score", left and left.reward, right and right.reward)
    for field in fields(Score):
        first, second = getattr(left, field.name), getattr(right, field.name)
        if not _equal(first, second):
            return _differs(where, "reward" if field.name == "reward" else f"score: {field.name}", first, second)
    return None


def _by_place(group: Group) -> dict[int, Rollout]:
    """Return the final attempt of each rollout of a group, by its index."""
    return {rollout.index: rollout for rollout in (*sorted(group.failed, key=lambda r: r.attempt), *group.rollouts)}


def _scores(group: Group) -> dict[int, Score]:
    return {rollout.index: score for rollout, score in zip(group.rollouts, group.scores, strict=True)}


def _equal(left: Any, right: Any) -> bool:
    """Return True if two values are equal to the bit, NaN included, apart from the order of a mapping's keys."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return encode(left) == encode(right)


def _differs(where: str, what: str, left: Any, right: Any) -> RecordDifference:
    return RecordDifference(where=where, what=what, values=(_text(left), _text(right)))


def _text(value: Any) -> str:
    """Return a value as text, truncated to a line."""
    text = value if isinstance(value, str) else "none" if value is None else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
