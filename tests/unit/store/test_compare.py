"""Records of two runs, compared: what differs first is named, and what cannot matter is no difference."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rollouts import LOST, make_group, make_rollout
from segments import sampled

from sparring.generation import Runs
from sparring.log import LogEntry, step_name
from sparring.store.compare import (
    Comparison,
    RecordEnd,
    first_difference,
    first_group_difference,
    first_metric_difference,
)
from sparring.store.sqlite import SqliteStore
from sparring.types import Group, Outcome, Rollout, Score, Segment, Timing

STEPS, GROUPS = 2, 2


def segment(index: int, is_sampled: bool, **changes: Any) -> Segment:
    """Three tokens: what the world says, or what the policy sampled at version 1."""
    place = {"index": index, "parent": index - 1 if index else None, "tokens": (5, 6, 7)}
    if not is_sampled:
        return Segment(**{**place, "source": "prompt", **changes})
    more = {"logprobs": (-0.5, -1.5, -2.5), "kv_versions": Runs.of(1, 3), **changes}
    return sampled(**{**place, "version": 1, **more})


def rollout(group: int, place: int, **changes: Any) -> Rollout:
    """Two turns. `changes` are of the second turn if a segment has them, else of the trajectory."""
    of_turn = {key: value for key, value in changes.items() if key in Segment.__dataclass_fields__}
    segments = (segment(0, False), segment(1, True), segment(2, False), segment(3, True, **of_turn))
    changed = {key: value for key, value in changes.items() if key not in of_turn}
    return make_rollout(make_group(group).task, f"rl/{group}/{place}", index=place, **{"segments": segments, **changed})


def group(index: int, changed: dict[str, Any], **changes: Any) -> Group:
    """Two rollouts; `changed` is of the second one."""
    rollouts = (rollout(index, 0), rollout(index, 1, **changed))
    scores = (Score(reward=1.0, parts={"form": 0.5, "right": 0.5}), Score(reward=0.0))
    fields = {"task": rollouts[0].task, "rollouts": rollouts, "scores": scores, "version": index // GROUPS}
    return Group(**{"id": f"rl/{index}", "index": index, **fields, **changes})


def record(
    path: Path, groups: list[Group], log: dict[str, dict[str, Any]] | None = None, *, backwards: bool = False
) -> SqliteStore:
    """A record of these groups, with the log of `STEPS` steps; `log` replaces what entries hold, by kind, of step 2."""
    store = SqliteStore(path / "store.sqlite")
    for each in reversed(groups) if backwards else groups:
        observed = 0 if backwards else each.index
        data = {"task": each.task.id, "digest": "00", "version": each.version, "observed": observed}
        late = each.index == GROUPS and log is not None
        entry = {**data, **(log or {}).get("admitted", {})} if late else data
        store.record(LogEntry(stage="rl", kind="admitted", name=each.id, data=entry))
    for each in reversed(groups) if backwards else groups:
        store.append(each, stage="rl")
    for step in range(1, len(groups) // GROUPS + 1):
        names = [f"rl/{index}" for index in range((step - 1) * GROUPS, step * GROUPS)]
        entries = {"trained": {"groups": names}, "published": {"checksum": f"{step}", "digests": bytes(range(24))}}
        if step == STEPS:
            entries |= {kind: data for kind, data in (log or {}).items() if kind in entries}
        for kind, data in entries.items():
            store.record(LogEntry(stage="rl", kind=kind, name=step_name("rl", step), data=data))
        store.metric("rl", step, {"loss": 0.5 / step, "step_s": 1.0 if backwards else 2.0})
    return store


def compared(tmp_path: Path, groups: list[Group], log: dict[str, dict[str, Any]] | None = None) -> Comparison:
    """What differs between a plain record and one of these groups, whose events came in another order."""
    plain = [group(index, {}) for index in range(STEPS * GROUPS)]
    with (
        closing(record(tmp_path / "a", plain)) as one,
        closing(record(tmp_path / "b", groups, log, backwards=True)) as other,
    ):
        return first_difference(one, other, "rl", GROUPS)


def others(**changed: Any) -> list[Group]:
    """The plain groups, where the second rollout of the third group has these changes."""
    return [group(index, changed if index == 2 else {}) for index in range(STEPS * GROUPS)]


LEAST_MORE = -1.5000000000000002
SHORTER = {"tokens": (5, 6), "logprobs": (-0.5, -1.5), "versions": Runs.of(1, 2), "kv_versions": Runs.of(1, 2)}


@pytest.mark.parametrize(
    ("changed", "what", "values"),
    [
        ({"tokens": (5, 9, 7)}, "sampled token 1", ("6", "9")),
        (SHORTER, "sampled token 2", ("7", "none")),
        ({"logprobs": (-0.5, LEAST_MORE, -2.5)}, "log-probability of sampled token 1", ("-1.5", str(LEAST_MORE))),
        ({"versions": Runs(lengths=(2, 1), values=(1, 2))}, "version of sampled token 2", ("1", "2")),
        ({"kv_versions": Runs(lengths=(1, 2), values=(0, 1))}, "KV version of sampled token 0", ("1", "0")),
        ({"tokens": (5, 6, 9), "logprobs": (-0.5, -1.0, -2.5)}, "log-probability of sampled token 1", ("-1.5", "-1.0")),
        ({"finish_reason": "length"}, "finish reason", ("none", "length")),
    ],
)
def test_the_first_token_that_differs_is_named(tmp_path: Path, changed: dict[str, Any], what: str, values: Any) -> None:
    difference = compared(tmp_path, others(**changed))
    assert (difference.where, difference.what, difference.values) == ("rl step 2, rl/2/1 turn 2", what, values)


LONGER_PROMPT = (segment(0, False), segment(1, True), segment(2, False, tokens=(5, 6, 7, 8)), segment(3, True))


@pytest.mark.parametrize(
    ("changed", "where", "what"),
    [
        ({"outcome": Outcome(kind="truncated", reason="max_turns")}, "rl step 2, rl/2/1", "outcome"),
        ({"segments": (segment(0, False), segment(1, True))}, "rl step 2, rl/2/1 turn 2", "segment"),
        ({"segments": LONGER_PROMPT}, "rl step 2, rl/2/1 turn 2", "prompt token 3"),
    ],
)
def test_the_first_part_of_a_rollout_that_differs_is_named(
    tmp_path: Path, changed: dict[str, Any], where: str, what: str
) -> None:
    difference = compared(tmp_path, others(**changed))
    assert (difference.where, difference.what) == (where, what)


def test_a_reward_that_differs_is_named(tmp_path: Path) -> None:
    scores = (Score(reward=1.0, parts={"right": 0.5, "form": 0.5}), Score(reward=0.25))
    groups = [group(index, {}, **({"scores": scores} if index == 2 else {})) for index in range(STEPS * GROUPS)]
    difference = compared(tmp_path, groups)
    assert (difference.where, difference.what, difference.values) == ("rl step 2, rl/2/1", "reward", ("0.0", "0.25"))


SWAPPED = ["rl/3", "rl/2"]
OTHER_TENSOR = bytes([*range(15), 0, *range(16, 24)])


@pytest.mark.parametrize(
    ("kind", "data", "what", "values", "tensor"),
    [
        ("admitted", {"task": "task-9"}, "admission of rl/2: task", ("task-2", "task-9"), None),
        ("admitted", {"digest": "11"}, "admission of rl/2: digest of the task's contents", ("00", "11"), None),
        ("admitted", {"version": 0}, "admission of rl/2: version of the weights", ("1", "0"), None),
        ("trained", {"groups": SWAPPED}, "order of training", ("['rl/2', 'rl/3']", str(SWAPPED)), None),
        ("published", {"digests": bytes(range(24))}, "checksum of the published weights", ("2", "x"), None),
        ("published", {"digests": OTHER_TENSOR}, "checksum of the published weights", ("2", "x"), 1),
        ("published", {"digests": b""}, "tensors that were published", ("3", "0"), None),
    ],
)
def test_the_first_event_that_differs_is_named(
    tmp_path: Path, kind: str, data: dict[str, Any], what: str, values: Any, tensor: int | None
) -> None:
    difference = compared(tmp_path, others(), {kind: {**data, "checksum": "x"}})
    assert (difference.where, difference.what, difference.values) == ("rl step 2", what, values)
    assert difference.tensor == tensor


def test_order_in_time_seconds_and_broken_attempts_are_ignored(tmp_path: Path) -> None:
    broken = dataclasses.replace(rollout(2, 1, segments=(), outcome=LOST), id="rl/2/1/broken-0")
    groups = others(timing=Timing(started=5.0, wall_s=3.0))
    groups[2] = dataclasses.replace(groups[2], failed=(broken,))
    assert compared(tmp_path, groups) is None


@pytest.mark.parametrize(("count", "after"), [(0, "step 0"), (1, "step 0"), (2, "step 1"), (3, "step 1")])
def test_the_end_of_a_shorter_record_is_reported(tmp_path: Path, count: int, after: str) -> None:
    assert compared(tmp_path, others()[:count]) == RecordEnd(record=1, after=after)


def test_a_difference_before_the_end_comes_first(tmp_path: Path) -> None:
    assert compared(tmp_path, others(tokens=(5, 9, 7))[:3]).what == "sampled token 1"


def test_evaluations_and_metrics_are_compared_too(tmp_path: Path) -> None:
    with (
        closing(record(tmp_path / "a", others())) as one,
        closing(record(tmp_path / "b", others(tokens=(5, 9, 7)))) as other,
        closing(record(tmp_path / "c", others()[:2])) as short,
    ):
        assert first_group_difference(one, one, "rl") is None
        assert first_group_difference(one, other, "rl").what == "sampled token 1"
        assert first_group_difference(one, short, "rl") == RecordEnd(record=1, after="rl/1")
        assert first_metric_difference(one, other, "rl") is None
        assert first_metric_difference(short, one, "rl") == RecordEnd(record=0, after="step 1")
        other.metric("rl", 3, {"loss": 1.0, "step_s": 3.0})
        one.metric("rl", 3, {"loss": 1.5, "step_s": 4.0})
        difference = first_metric_difference(one, other, "rl")
        assert (difference.where, difference.what, difference.values) == ("rl step 3", "loss", ("1.5", "1.0"))
