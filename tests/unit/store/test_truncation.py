"""A store whose files were cut at any byte: it goes on from what is durable, or is refused with what to do."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from rollouts import make_group, make_segment
from stored import sql

from sparring.errors import BadInput, StoreError
from sparring.log import LogEntry
from sparring.store.sqlite import SqliteStore
from sparring.types import CheckpointRef

State = tuple[int, int, int, int, Any]
PAGE, FRAME = 4096, 4096 + 24


def state(store: SqliteStore) -> State:
    """What is recorded, in numbers; all of it is read."""
    checkpoint = store.last_checkpoint("rl")
    if checkpoint is not None:
        assert checkpoint[1]["numbers"] == list(range(1000, 1600)), "no page of it reads as zeros"
    groups = list(store.groups(stage="rl"))
    assert groups == [make_group(number, 150) for number in range(len(groups))]
    steps = [step for step, _ in store.metrics("rl")]
    return (
        len(list(store.entries("rl"))),
        len(groups),
        len(steps),
        checkpoint[0].step if checkpoint else -1,
        store.get("x"),
    )


def fill(folder: Path, copied: Literal["never", "half", "late", "all"]) -> tuple[dict[str, bytes], list[State]]:
    """The files of a store as a kill leaves them, its log copied into the database or not; what it had recorded after
    each commit."""
    store = SqliteStore(folder / "store.sqlite")
    states = [state(store)]
    for number in range(4):
        ref = CheckpointRef(model="policy", stage="rl", step=number, path=str(folder))
        for write in (
            lambda: store.record(LogEntry(stage="rl", kind="admitted", name=f"rl/{number}")),
            lambda: store.append_turns([(f"rl/{number}/0", [make_segment(number, 100)])]),
            lambda: store.append(make_group(number, 150), stage="rl"),
            lambda: store.metric("rl", number, {"n": number}),
            lambda: store.checkpoint(ref, {"numbers": list(range(1000, 1600))}),
            lambda: store.put("x", number),
        ):
            write()
            states.append(state(store))
        if (copied, number) in (("half", 1), ("late", 1), ("all", 3)):
            sql(folder, "PRAGMA wal_checkpoint(TRUNCATE)")
    if copied == "late":  # as `_copy_log` does it: the log stays
        sql(folder, "PRAGMA wal_checkpoint(PASSIVE)")
    files = {name: (folder / name).read_bytes() for name in ("store.sqlite", "store.sqlite-wal")}
    store.close()
    return files, states


def cuts(length: int) -> list[int]:
    """Every kind of place: the beginning, the borders of pages and frames, anywhere."""
    chance = random.Random(length)
    borders = [*range(0, length, 11 * PAGE), *range(32, length, 23 * FRAME)]
    places = {0, 1, 31, 99, 100, *(border + off for border in borders for off in (-1, 0, 24))}
    places |= {chance.randrange(length) for _ in range(16 if length else 0)}
    return sorted(place for place in places if 0 <= place < length)


@pytest.mark.parametrize("copied", ["never", "half", "late", "all"])
@pytest.mark.parametrize("cut", ["store.sqlite", "store.sqlite-wal"])
def test_a_truncated_store_opens_at_a_commit_or_is_refused(tmp_path: Path, copied: Any, cut: str) -> None:
    (tmp_path / "whole").mkdir()
    files, states = fill(tmp_path / "whole", copied)
    outcomes = {"open": 0, "refused": 0}
    for place in cuts(len(files[cut])):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content[:place] if name == cut else content)
        try:
            with closing(SqliteStore(folder / "store.sqlite")) as store:
                assert state(store) in states, place
                store.put("y", place)
                assert store.get("y") == place
        except StoreError as error:
            assert str(error).endswith("the file is damaged: restore it from a copy, or start a new run folder"), place
            outcomes["refused"] += 1
        else:
            outcomes["open"] += 1
    if cut == "store.sqlite-wal":
        assert bool(outcomes["refused"]) == (copied == "late"), "a log that was cut ends with the last whole commit"
    else:  # what the log has is not missed; a file of no bytes without a log is a new one
        assert outcomes["refused"] and (copied in ("never", "late") or outcomes["open"] == (copied == "all"))


def test_every_store_that_a_kill_leaves_opens(tmp_path: Path) -> None:
    """Pages are freed and taken again, and copied at any time, in parts too, while a reader holds an older state."""
    chance = random.Random(7)
    path = tmp_path / "store.sqlite"
    store = SqliteStore(path)
    for number in range(60):
        store.append_turns([(f"rl/{number}/{place}", [make_segment(1, chance.randrange(600))]) for place in range(3)])
        if chance.random() < 0.5:
            store.forget(f"rl/{chance.randrange(number + 1)}/0")
        store.put(str(chance.randrange(4)), bytes(chance.randrange(20_000)))
        with closing(sqlite3.connect(path)) as reader, closing(sqlite3.connect(path)) as copier:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM turns").fetchone()
            store.put("late", bytes(chance.randrange(9000)))
            if chance.random() < 0.3:
                copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        for name in ("store.sqlite", "store.sqlite-wal"):
            shutil.copy(tmp_path / name, tmp_path / f"killed-{name}")
        with closing(SqliteStore(tmp_path / "killed-store.sqlite", read_only=True)) as killed:
            assert killed.get("late") == store.get("late")
        (tmp_path / "killed-store.sqlite-shm").unlink(missing_ok=True)
    store.close()


def test_reading_a_run_that_has_just_begun_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    with pytest.raises(BadInput, match="expected the store"):
        SqliteStore(path, read_only=True)


def test_a_store_that_is_refused_can_be_restored(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    files, states = fill(tmp_path / "whole", "all")
    path = tmp_path / "store.sqlite"
    path.write_bytes(files["store.sqlite"][:50])
    with pytest.raises(StoreError, match="expected a database"):
        SqliteStore(path)
    path.write_bytes(files["store.sqlite"])
    with closing(SqliteStore(path)) as store:
        assert state(store) == states[-1]


def test_a_page_that_would_read_as_zeros_is_detected(tmp_path: Path) -> None:
    """The last page holds the end of a value; the log is younger and does not have it, yet says that it is there."""
    path = tmp_path / "store.sqlite"
    store = SqliteStore(path)
    store.put("numbers", [7] * 10_000)
    sql(tmp_path, "PRAGMA wal_checkpoint(TRUNCATE)")
    store.put("late", 1)
    files = {name: (tmp_path / name).read_bytes() for name in ("store.sqlite", "store.sqlite-wal")}
    store.close()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content[: -1 if name == "store.sqlite" else None])
    with pytest.raises(StoreError, match=r"expected \d+ pages"):
        SqliteStore(path)
