"""A store without shared memory: one process alone, readers after it, nothing lost by a kill."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from rollouts import make_group

from sparring.errors import BadInput, StoreError
from sparring.store.connection import connect, copy_store, is_blank, lock_of
from sparring.store.sqlite import LOG_BYTES, SqliteStore

WRITER = """
import sys
from sparring.store.sqlite import SqliteStore
sys.path.insert(0, sys.argv[2])
from rollouts import make_group
store = SqliteStore(sys.argv[1], exclusive=True)
store.append(make_group(0), stage="rl")
print("written", flush=True)
sys.stdin.read()
store.close()
"""


@contextmanager
def writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has written a group and holds the store until its input ends."""
    words = [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parents[2])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        yield process
        process.kill()


def groups(path: Path) -> list[int]:
    with closing(SqliteStore(path, read_only=True, exclusive=True)) as store:
        return [group.index for group in store.groups(stage="rl")]


def names(folder: Path) -> set[str]:
    return {file.name.removeprefix("store.sqlite") for file in folder.iterdir()}


def test_it_makes_no_file_of_shared_memory_and_ends_its_log(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for number in range(2):
        store = SqliteStore(path, exclusive=True)
        store.append(make_group(number), stage="rl")
        assert names(tmp_path) == {"", "-wal", ".lock"}
        store.close()
        store.close()
        assert names(tmp_path) == {"", ".lock"}
    assert groups(path) == [0, 1] and names(tmp_path) == {"", ".lock"}


def test_it_works_where_shared_memory_cannot_be_made(tmp_path: Path) -> None:
    """A folder stands in its place."""
    path = tmp_path / "store.sqlite"
    (tmp_path / "store.sqlite-shm").mkdir()
    with pytest.raises(StoreError, match="store.sqlite: expected to write"):
        SqliteStore(path)
    with closing(SqliteStore(path, exclusive=True)) as store:
        store.append(make_group(0), stage="rl")
    assert groups(path) == [0]


def test_readers_of_an_ended_run_do_not_exclude_one_another(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(SqliteStore(path, exclusive=True)) as store:
        store.put("key", 1)
    with closing(SqliteStore(path, read_only=True, exclusive=True)) as one:
        assert one.get("key") == 1
        with closing(SqliteStore(path, read_only=True, exclusive=True)) as other:
            assert (other.get("key"), one.get("key")) == (1, 1)


def test_readers_and_a_second_run_are_refused_by_name_until_the_run_ends(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with writing(path) as process:
        for opened in (
            lambda: SqliteStore(path, read_only=True, exclusive=True),
            lambda: SqliteStore(path, exclusive=True),
            lambda: connect(path, read_only=True, exclusive=True),
        ):
            with pytest.raises(BadInput, match=f"got pid {process.pid};") as refused:
                opened()
            assert refused.value.where == str(tmp_path)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert groups(path) == [0] and not is_blank(path)


def test_another_host_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(SqliteStore(path, exclusive=True)):
        lock_of(path).write_text("17\nnode-3\n")  # as that host would have written it
        for read_only in (True, False):
            with pytest.raises(BadInput, match="got pid 17 on host node-3"):
                SqliteStore(path, read_only=read_only, exclusive=True)


def test_a_killed_run_loses_nothing_and_its_readers_need_no_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with writing(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert names(tmp_path) == {"", "-wal", ".lock"}
    assert groups(path) == [0] and names(tmp_path) == {"", ".lock"}
    with writing(path.with_name("again.sqlite")) as process:
        process.kill()
        process.wait()
    with closing(SqliteStore(tmp_path / "again.sqlite", exclusive=True)) as store:
        assert [group.index for group in store.groups(stage="rl")] == [0]


def test_a_store_moves_from_one_file_system_to_another(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for number, exclusive in enumerate((False, True, False)):
        with closing(SqliteStore(path, exclusive=exclusive)) as store:
            store.append(make_group(number), stage="rl")
    copy_store(path, tmp_path / "copy.sqlite")
    assert groups(tmp_path / "copy.sqlite") == [0, 1, 2]


def test_its_log_is_copied_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(SqliteStore(path, exclusive=True)) as store:
        empty = path.stat().st_size
        store.put("large", "x" * (LOG_BYTES + 1))
        while path.stat().st_size <= empty + LOG_BYTES:
            store.put("next", 1)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM pairs").fetchone() == (2,)
