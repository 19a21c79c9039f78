"""The log of groups, on a real store."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused_at

from sparring.errors import SparringError
from sparring.rollout.group_log import GroupLog
from sparring.rollout.runner import Finished
from sparring.store.sqlite import SqliteStore
from sparring.testing.toy import toy_task
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, Trajectory

PROMPT = Segment(index=0, parent=None, source="prompt", tokens=(1, 2))


def make_group(index: int) -> Group:
    return Group(id=f"rl/{index}", index=index, task=toy_task(index), rollouts=(), scores=())


def make_finished(name: str) -> Finished:
    """A rollout of one segment whose first attempt broke."""

    def rollout(attempt: int, outcome: Outcome) -> Rollout:
        own = f"{name}/retry-{attempt}" if attempt else name
        trajectory = Trajectory(id=own, task="train-0", role="policy", segments=(PROMPT,), outcome=outcome)
        return Rollout(id=own, task=toy_task(0), index=0, attempt=attempt, purpose="train", trajectories=(trajectory,))

    broken = rollout(0, Outcome(kind="infra_failed", reason="failure"))
    return Finished(
        rollout=rollout(1, Outcome(kind="completed", reason="answered")), score=Score(reward=0.5), broken=(broken,)
    )


def test_groups_that_end_together_leave_the_event_loop_to_others_between_their_commits(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        log, passes, recorded = GroupLog(store), 0, []

        async def others() -> None:
            nonlocal passes
            while len(recorded) < 20:
                passes += 1
                await asyncio.sleep(0)

        async def end(index: int) -> None:
            await log.append(make_group(index))
            recorded.append(passes)

        async def main() -> None:
            await asyncio.gather(others(), *(end(index) for index in range(20)))

        asyncio.run(main())
        assert len(set(recorded)) == 20
        assert [group.index for group in store.groups(stage="rl")] == list(range(20))


def test_a_finished_rollout_comes_back_with_its_attempts_and_its_segments(tmp_path: Path) -> None:
    finished = make_finished("rl/0/1")
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        log = GroupLog(store)
        store.append_turns([("rl/0/1", [PROMPT]), ("rl/0/1/retry-1", [PROMPT])])
        asyncio.run(log.finish("rl/0/1", toy_task(0), finished))
        assert log.finished("rl/0/1", toy_task(0)) == finished
        assert log.finished("rl/0/2", toy_task(0)) is None
        size = sum(sys.getsizeof(entry.data["finished"]) for _, entry in store.entries("rl"))
        store.forget("rl/0/1/retry-1")
        assert log.finished("rl/0/1", toy_task(0)) is None, "its turns are not all there"
        baseline = make_finished("rl/0/baseline")
        asyncio.run(log.finish("rl/0/baseline", toy_task(0), baseline, by_turns=False))
        assert log.finished("rl/0/baseline", toy_task(0)) == baseline
        assert size < 1000, "tokens are held once"


def test_a_task_that_is_not_the_recorded_one_is_refused_by_name(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        log = GroupLog(store)
        assert log.admission(3) is None
        log.admit(3, toy_task(7), version=2, observed=1)
        admission = log.admission(3)
        assert admission is not None and (admission.version, admission.observed) == (2, 1)
        assert log.check(3, admission, toy_task(7)) == toy_task(7)
        changed = replace(toy_task(7), data={"a": 1, "b": 1})
        for task, got in (
            (changed, "task train-7 with other contents"),
            (toy_task(8), "task train-8"),
            (None, "the end"),
        ):
            with refused_at("group rl/3", f"got {got}"):
                log.check(3, admission, task)


@pytest.mark.parametrize(
    ("files", "task", "advice"),
    [
        ({}, toy_task(8), "give [env] the data of when"),
        ({"": "env.data (a.jsonl)"}, toy_task(8), "give env.data (a.jsonl) what it held when"),
        ({"toy": "x.data (a)", "other": "y.data (b)"}, toy_task(8), "give x.data (a) what it held when"),
        ({"toy": "x.data (a)", "other": "y.data (b)"}, None, "give x.data (a) and y.data (b) what they held when"),
        ({"other": "y.data (b)"}, toy_task(8), "give [env] the data of when"),
    ],
)
def test_the_refusal_names_the_files_that_may_have_changed(
    tmp_path: Path, files: dict[str, str], task: Task | None, advice: str
) -> None:
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        log = GroupLog(store, files=files)
        log.admit(3, toy_task(7), version=0, observed=0)
        admission = log.admission(3)
        assert admission is not None
        with refused_at("group rl/3", f"; {advice} this run was begun"):
            log.check(3, admission, task)


def test_a_step_that_is_done_again_takes_the_groups_that_it_took(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        log = GroupLog(store)
        for _ in range(2):
            log.train(1, ["rl/0", "rl/1"])
        with pytest.raises(SparringError, match="rl@1: expected the recorded groups rl/0, rl/1, got rl/1, rl/0"):
            log.train(1, ["rl/1", "rl/0"])
        assert len(list(store.entries("rl", kinds=["trained"]))) == 1


def test_without_a_store_nothing_is_recorded_and_nothing_begun() -> None:
    log = GroupLog()
    log.admit(0, toy_task(0), version=0, observed=0)
    log.train(1, ["rl/0"])
    log.restart("rl/0/0", "why")
    asyncio.run(log.append(make_group(0)))
    asyncio.run(log.finish("rl/0/0", toy_task(0), make_finished("rl/0/0")))
    assert (log.admission(0), log.group(0), log.finished("rl/0/0", toy_task(0)), log.last_published(4)) == (
        None,
        None,
        None,
        4,
    )
