"""What every store does. A new store joins `STORES`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparring.errors import BadInput, StoreError
from sparring.generation import Runs
from sparring.log import LogEntry
from sparring.protocols import Store
from sparring.store.sqlite import SqliteStore
from sparring.types import CheckpointRef, Failure, Group, Message, Outcome, Rollout, Score, Segment, Task, Trajectory

STORES: list[Callable[[Path], Store]] = [lambda folder: SqliteStore(folder / "store.sqlite")]
every_store = pytest.mark.parametrize("open_store", STORES)
Opener = Callable[[Path], Store]

ANSWERED = Outcome(kind="completed", reason="answered")
BROKEN = Outcome(
    kind="infra_failed", reason="failure", failure=Failure(error="SandboxError", where="box", message="gone")
)


def make_rollout(task: Task, name: str, number: int, outcome: Outcome = ANSWERED) -> Rollout:
    """A rollout of a prompt and one reply."""
    reply = Segment(
        index=1,
        parent=0,
        source="policy",
        tokens=(7, 8),
        model="policy",
        logprobs=(-0.1, -1e-300),
        versions=Runs.of(3, 2),
        kv_versions=Runs.of(3, 2),
    )
    prompt = Segment(index=0, parent=None, source="prompt", tokens=(1, 2))
    trajectory = Trajectory(id=name, task=task.id, role="policy", segments=(prompt, reply), outcome=outcome)
    return Rollout(id=name, task=task, index=number, attempt=0, purpose="train", trajectories=(trajectory,))


def make_group(index: int, stage: str = "rl") -> Group:
    """A group of two, and one that left."""
    task = Task(
        id=f"task-{index}", env="toy", messages=(Message(role="user", content="?"),), data={"n": [1, 2.5, None]}
    )
    return Group(
        id=f"{stage}/{index}",
        index=index,
        task=task,
        rollouts=tuple(make_rollout(task, f"{stage}/{index}/{n}", n) for n in range(2)),
        scores=(Score(reward=1.0, success=True), Score(reward=0.1 + 0.2, parts={"style": 0.1})),
        failed=(make_rollout(task, f"{stage}/{index}/2", 2, BROKEN),),
        version=index,
    )


@every_store
def test_the_trajectories_of_a_rollout_are_told_from_its_neighbours(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (trajectory,) = make_rollout(make_group(0).task, "rl/0/1", 1).trajectories
    names = ["rl/0/1/white", "rl/0/1", "rl/0/1/retry-1/white", "rl/0/10", "rl/0/1/white", "rl/0", "rl/0/10/white"]
    store.append_turns([(name, trajectory.segments) for name in names])
    assert store.trajectories("rl/0/1") == ["rl/0/1", "rl/0/1/retry-1/white", "rl/0/1/white"]
    assert store.trajectories("rl/0/2") == []
    store.close()


@every_store
def test_groups_come_back_in_admission_order(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for index in (2, 0, 1):
        store.append(make_group(index), stage="rl")
    store.append(make_group(0, "eval"), stage="eval")
    assert list(store.groups(stage="rl")) == [make_group(i) for i in range(3)]
    assert list(store.groups(stage="eval")) == [make_group(0, "eval")]
    assert list(store.groups(stage="sft")) == []
    store.close()


@every_store
def test_what_was_written_is_there_for_the_next_process(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(make_group(0), stage="rl")
    store.metric("rl", 1, {"reward": 0.1})
    store.put("result", {"a": [1, None]})
    store.close()
    again = open_store(tmp_path)
    assert list(again.groups(stage="rl")) == [make_group(0)]
    assert again.metrics("rl") == [(1, {"reward": 0.1})]
    assert again.get("result") == {"a": [1, None]}
    again.close()


@every_store
def test_every_rollout_can_be_loaded_even_one_that_left(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    group = make_group(4)
    store.append_turns([("rl/4/0", group.rollouts[0].trajectories[0].segments)])
    store.append(group, stage="rl")
    for rollout in (*group.rollouts, *group.failed):
        assert store.load(rollout.id) == rollout
    with pytest.raises(BadInput, match="expected the id of a recorded rollout, got 'rl/5/0'"):
        store.load("rl/5/0")
    store.close()


@every_store
def test_a_group_counts_once(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(make_group(0), stage="rl")
    with pytest.raises(StoreError):
        store.append(make_group(0), stage="rl")
    assert list(store.groups(stage="rl")) == [make_group(0)]
    store.close()


@every_store
def test_groups_are_appended_all_or_none(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(make_group(0), make_group(1), stage="rl")
    with pytest.raises(StoreError):
        store.append(make_group(2), make_group(1), stage="rl")
    assert list(store.groups(stage="rl")) == [make_group(0), make_group(1)]
    store.close()


@every_store
def test_the_log_keeps_its_order(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entries = [
        LogEntry(stage="rl", kind="admitted", name=f"rl/{n}", data={"version": n, "big": 2**70, "p": 0.1 + 0.2})
        for n in range(600)
    ]
    entries[300] = LogEntry(stage="rl", kind="limit", name="rl/7/0", data={"seconds": 2.5})
    other = LogEntry(stage="distill", kind="admitted", name="distill/0")
    store.record(*entries[:2])
    store.record(other, *entries[2:599])
    store.append_turns([], entries[599:])
    store.close()
    store = open_store(tmp_path)
    rows = dict(store.entries("rl"))
    assert list(rows.values()) == entries and list(rows) == sorted(rows)
    assert [entry for _, entry in store.entries("distill")] == [other]
    assert [entry for _, entry in store.entries("rl", kinds=["limit", "trained"])] == [entries[300]]
    assert [entry for _, entry in store.entries("rl", name="rl/9")] == [entries[9]]
    last = list(rows)[-3]
    assert [entry for _, entry in store.entries("rl", after=last)] == entries[-2:]
    assert list(store.entries("rl", kinds=[])) == []
    store.close()


@every_store
def test_entries_are_recorded_all_or_none(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    whole = LogEntry(stage="rl", kind="outcome", name="rl/0/0")
    with pytest.raises(TypeError):
        store.record(whole, LogEntry(stage="rl", kind="outcome", name="rl/0/1", data={"x": object()}))
    assert list(store.entries("rl")) == []
    with pytest.raises(ValueError, match="expected a kind of sparring/log.py, got 'hope'"):
        LogEntry(stage="rl", kind="hope", name="rl/0")  # type: ignore[arg-type]
    store.close()


@every_store
def test_metrics_and_pairs(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.metric("rl", 2, {"b": 2.0})
    store.metric("rl", 1, {"a": 1.0, "zero": 0.0})
    store.metric("sft", 1, {"loss": 3.0})
    assert store.metrics("rl") == [(1, {"a": 1.0, "zero": 0.0}), (2, {"b": 2.0})]
    assert store.get("never") is None
    store.put("key", 1)
    store.put("key", {"n": 2**70})
    assert store.get("key") == {"n": 2**70}
    store.close()


@every_store
def test_a_checkpoint_needs_its_folder(open_store: Opener, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    missing = CheckpointRef(model="policy", stage="rl", step=5, path=str(tmp_path / "rl-5"))
    with pytest.raises(StoreError, match="expected the complete folder"):
        store.checkpoint(missing, {})
    assert store.last_checkpoint("rl") is None
    (tmp_path / "rl-5").mkdir()
    store.checkpoint(missing, {"source": {"next": 40}})
    (tmp_path / "rl-9").mkdir()
    later = replace(missing, step=9, path=str(tmp_path / "rl-9"), metrics={"reward": 0.5})
    store.checkpoint(later, {"source": {"next": 72}})
    assert store.last_checkpoint("rl") == (later, {"source": {"next": 72}})
    assert store.last_checkpoint("sft") is None
    assert list(store.checkpoints("rl")) == [missing, later]
    (tmp_path / "rl-9").rmdir()
    assert store.last_checkpoint("rl") == (missing, {"source": {"next": 40}})
    assert list(store.checkpoints("rl")) == [missing]
    store.truncate("rl", 4)
    assert list(store.checkpoints("rl")) == []
    store.close()
