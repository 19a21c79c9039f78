"""The SQLite store against the world: kills, full disks, a second run, damage."""

import math
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rollouts import make_group, make_segment
from stored import sql

from sparring.errors import BadInput, StoreError
from sparring.store.sqlite import SqliteStore
from sparring.types import CheckpointRef

WRITER = """
import sys
from pathlib import Path
from sparring.store.sqlite import SqliteStore
sys.path.insert(0, sys.argv[2])
from rollouts import make_group, make_segment
store = SqliteStore(sys.argv[1])
number = len(list(store.groups(stage="rl")))
while True:
    for place in range(2):
        store.append_turns([(f"rl/{number}/{place}", [make_segment(number)])])
    store.append(make_group(number), stage="rl")
    store.metric("rl", number, {"number": number})
    store.put("last", number)
    print(number, flush=True)
    number += 1
"""

FILLER = """
import resource, sys
from sparring.errors import StoreError
from sparring.store.sqlite import SqliteStore
sys.path.insert(0, sys.argv[2])
from rollouts import make_group, make_segment
store = SqliteStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
for number in range(10_000):
    try:
        store.append(make_group(number, size=500), stage="rl")
    except StoreError as error:
        print(number, error)
        break
assert len(list(store.groups(stage="rl"))) == number
store.close()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        yield store


def child(script: str, path: Path) -> subprocess.Popen[str]:
    """A process that writes to the store."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path), str(Path(__file__).parents[2])],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_kill_9_at_random_moments_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / "store.sqlite"
    chance = random.Random(5)
    said = -1
    for _ in range(5):
        writer = child(WRITER, path)
        assert writer.stdout is not None
        for _ in range(chance.randrange(1, 60)):
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        said = int(rest[-1]) if rest else said
        assert sql(path, "PRAGMA integrity_check") == [("ok",)]
        store = SqliteStore(path)
        groups = list(store.groups(stage="rl"))
        assert groups == [make_group(number) for number in range(len(groups))]
        assert len(groups) in (said + 1, said + 2)  # what it said is there; at most the one in hand is too
        assert [step for step, _ in store.metrics("rl")] in (list(range(len(groups))), list(range(len(groups) - 1)))
        in_flight = [store.turns(f"rl/{len(groups)}/{place}") for place in range(2)]
        assert all(turns in ([], [make_segment(len(groups))]) for turns in in_flight)
        assert not any(store.turns(f"rl/{len(groups) - 1}/{place}") for place in range(2))
        if len(store.metrics("rl")) < len(groups):  # the writer goes on behind the last group
            store.metric("rl", len(groups) - 1, {"number": len(groups) - 1})
        store.truncate("rl", len(groups), first_group=len(groups))
        store.close()


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    filler = child(FILLER, path)
    out, _ = filler.communicate()
    assert filler.returncode == 0
    number, _, message = out.partition(" ")
    assert int(number) > 3 and "got a limit of 0.3 MB for each file" in message and str(path) in message
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]
    with closing(SqliteStore(path)) as store:
        assert list(store.groups(stage="rl")) == [make_group(n, size=500) for n in range(int(number))]
        store.append(make_group(int(number)), stage="rl")


def test_a_full_database_is_reported_and_loses_nothing(store: SqliteStore) -> None:
    store._database.execute("PRAGMA max_page_count = 60")
    number = 0
    with pytest.raises(StoreError, match=r"MB free \(database or disk is full\); free disk space"):
        while True:
            store.append(make_group(number, size=500), stage="rl")
            number += 1
    assert number > 3
    assert list(store.groups(stage="rl")) == [make_group(n, size=500) for n in range(number)]
    store._database.execute("PRAGMA max_page_count = 6000")
    store.append(make_group(number, size=500), stage="rl")
    assert len(list(store.groups(stage="rl"))) == number + 1


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    writer = child(WRITER, path)
    assert writer.stdout is not None
    writer.stdout.readline()
    with pytest.raises(BadInput, match=f"no other run in this folder, got pid {writer.pid}") as refused:
        SqliteStore(path)
    assert refused.value.where == str(tmp_path)
    with closing(SqliteStore(path, read_only=True)) as reader:  # a report may be written meanwhile
        assert next(iter(reader.groups(stage="rl"))) == make_group(0)
    writer.kill()
    writer.wait()
    with closing(SqliteStore(path)), pytest.raises(BadInput, match="expected no other run"):
        SqliteStore(path)  # the lock holds within a process too
    SqliteStore(path).close()


def test_a_resume_repeats_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    (tmp_path / "step").mkdir()
    for number in range(6):
        store.append(make_group(number), stage="rl")
        store.append(make_group(number), stage="other")
    for step in (1, 2, 3):
        store.metric("rl", step, {"loss": step})
        store.checkpoint(CheckpointRef(model="policy", stage="rl", step=step, path=str(tmp_path / "step")), {"k": step})
    store.append_turns([("rl/6/0", [make_segment(6)])])
    store.close()

    store = SqliteStore(tmp_path / "store.sqlite")
    store.append_turns([("rl/7/0", [make_segment(7)])])
    store.truncate("rl", 2, first_group=4)
    assert list(store.groups(stage="rl")) == [make_group(n) for n in range(4)]
    assert len(list(store.groups(stage="other"))) == 6
    assert [step for step, _ in store.metrics("rl")] == [1, 2]
    assert store.last_checkpoint("rl")[0].step == 2
    assert store.turns("rl/6/0") == []  # cut off by the crash
    assert store.turns("rl/7/0") == [make_segment(7)]  # this process's own
    for number in (4, 5):
        store.append(make_group(number), stage="rl")
    store.metric("rl", 3, {"loss": 30.0})
    assert list(store.groups(stage="rl")) == [make_group(n) for n in range(6)]
    assert store.metrics("rl")[-1] == (3, {"loss": 30.0})
    assert store.load("rl/4/0") == make_group(4).rollouts[0]
    store.close()


def test_events_are_kept_in_order_and_once(tmp_path: Path, store: SqliteStore) -> None:
    """A resume that does steps again takes none of them back: they have happened."""
    store.event("rl", "first")
    store.event("eval", "second", {"kind": "engine lost", "moved": 3})
    first, second = store.events()
    assert (first["stage"], first["event"]) == ("rl", "first") and first["time"] <= second["time"]
    assert second == {"time": second["time"], "stage": "eval", "event": "second", "kind": "engine lost", "moved": 3}
    store.truncate("rl", 0, first_group=0)
    store.close()
    with closing(SqliteStore(tmp_path / "store.sqlite")) as again:
        assert again.events() == [first, second]


def test_the_log_is_copied_into_the_database_while_writing(tmp_path: Path, store: SqliteStore) -> None:
    for number in range(1000):  # far more than needed; the copy happens beside it
        store.put(str(number % 30), bytes(300_000))
        if (tmp_path / "store.sqlite").stat().st_size > 4_000_000:
            break
    else:
        raise AssertionError("no copy")
    assert store.get("0") == bytes(300_000)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(BadInput, match="expected a SQLite database"):
        SqliteStore(tmp_path / "store.sqlite")
    (tmp_path / "store.sqlite").write_bytes(b"")  # what a kill right after creation leaves
    SqliteStore(tmp_path / "store.sqlite").close()


@pytest.mark.parametrize("version", [4, 7, 8])
@pytest.mark.parametrize("read_only", [False, True])
def test_another_version_is_refused_by_its_number_and_not_written(
    tmp_path: Path, version: int, read_only: bool
) -> None:
    path = tmp_path / "store.sqlite"
    SqliteStore(path).close()
    sql(path, f"PRAGMA user_version = {version}")
    before, wrote = path.read_bytes(), "a newer one" if version > 7 else "before-0.1.0 in CHANGELOG.md"
    with pytest.raises(BadInput) as refused:
        SqliteStore(path, read_only=read_only)
    said = f"{path}: expected the record of a run, of version 1, got one of version {version};"
    assert str(refused.value).startswith(f"{said} go on with the Sparring that wrote it ({wrote})")
    assert path.read_bytes() == before


def test_entries_about_one_id_are_found_by_an_index(tmp_path: Path, store: SqliteStore) -> None:
    asked = "SELECT row FROM log WHERE row > 7 AND superseded = 0 AND stage = 'rl' AND name = 'rl/1'"
    plan = sql(tmp_path, f"EXPLAIN QUERY PLAN {asked}")
    assert [line[-1] for line in plan] == ["SEARCH log USING INDEX log_by_name (name=? AND rowid>?)"]


def test_damaged_rows_are_reported(tmp_path: Path, store: SqliteStore) -> None:
    store.append(make_group(0), stage="rl")
    sql(tmp_path, "UPDATE groups SET data = x'c1'")
    with pytest.raises(StoreError, match="damaged data"):
        list(store.groups(stage="rl"))


def error_of(store: SqliteStore, number: int = 0) -> str:
    """What the store says when it cannot append a group, or read those it has."""
    with pytest.raises(StoreError) as caught:
        store.append(make_group(number), stage="rl")
        list(store.groups(stage="rl"))
    assert "store.sqlite: expected to " in str(caught.value)
    return str(caught.value).partition(", got ")[2]


def test_a_group_recorded_twice_is_reported_as_a_bug(store: SqliteStore) -> None:
    store.append(make_group(0), stage="rl")
    said = error_of(store)
    assert said.startswith("UNIQUE constraint failed: groups.stage, groups.number; it is already recorded")
    assert "disk" not in said and "defect of Sparring" in said


def test_a_locked_file_is_reported_as_locked(tmp_path: Path, store: SqliteStore) -> None:
    store._database.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert error_of(store).startswith("database is locked; end the program")
    store.append(make_group(0), stage="rl")


def test_a_damaged_file_is_reported_as_damaged(tmp_path: Path, store: SqliteStore) -> None:
    path = tmp_path / "store.sqlite"
    store.append(make_group(0, size=5000), stage="rl")
    store.close()
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    with pytest.raises(StoreError, match="malformed; the file is damaged"):
        SqliteStore(path)


def test_a_read_only_store_is_not_written(tmp_path: Path, store: SqliteStore) -> None:
    with closing(SqliteStore(tmp_path / "store.sqlite", read_only=True)) as reader:
        said = error_of(reader)
    assert said.startswith("attempt to write a readonly database; make the file and its folder writable")


def test_reading_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected the store"):
        SqliteStore(tmp_path / "store.sqlite", read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metrics", "named"),
    [({"a": 1.0, "rollout/rewards_missing": False}, "False"), ({"rollout/rewards_missing": None}, "None")],
)
def test_a_value_of_another_type_is_named_and_not_called_damage(
    tmp_path: Path, store: SqliteStore, metrics: dict[str, Any], named: str
) -> None:
    """No part of Sparring stores one."""
    store.checkpoint(CheckpointRef(model="policy", stage="rl", step=1, path=str(tmp_path), metrics=metrics), {})
    with pytest.raises(StoreError, match=rf"`\$.metrics\[...\]` {{'rollout/rewards_missing': {named}}}") as it:
        store.checkpoints("rl")
    assert "damaged" not in str(it.value)
    store.metric("rl", 1, {"grad_norm": math.inf, "rollout/reward": math.nan})
    [(_, values)] = store.metrics("rl")
    assert values["grad_norm"] == math.inf and math.isnan(values["rollout/reward"])
