"""Durable record of a run in one SQLite file.

Crash safety: every method is one transaction in write-ahead-log mode, so after kill -9 a call took effect or did not.
`synchronous = NORMAL` leaves the log's pages with the kernel at commit: they survive the death of this process, not a
power cut. A checkpoint manifest is committed with `FULL`, which also makes everything before it durable on disk.

Speed: a commit is a few writes into the kernel's page cache (tens of microseconds), short enough for the event loop.
Only copying the log into the database, with its fsync, is slow; a thread with its own connection does it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import StoreError, refusal
from sparring.log import LogEntry, LogKind
from sparring.store.advice import DAMAGED, store_error
from sparring.store.codec import StoredGroup, StoredRollout, decode, encode, refused_entries
from sparring.store.connection import connect, copy_log, end_log, lock_of, needs_exclusive
from sparring.store.lock import RunLock
from sparring.store.schema import create_tables, version_of
from sparring.store.truncation import check_pages
from sparring.types import CheckpointRef, Group, Rollout, Segment

DROPS = (("turns", "rollout", "DELETE FROM turns"), ("log", "name", "UPDATE log SET superseded = 1"))
"""Tables with rows of single rollouts, their id columns, and the statements that drop rows."""

MOST = 1 << 62
"""Upper bound of group numbers and steps."""

READ_AT_ONCE = 256
"""Number of log entries per query."""

LOG_BYTES = 8 << 20
"""Bytes written before the write-ahead log is copied into the database."""


class SqliteStore:
    """Store in one SQLite file, for one writer per folder; readers (report, replay) open it with `read_only`.
    Implements `protocols.Store`. Every method may raise StoreError (the disk is full, or the file is damaged): the
    method then wrote nothing, and earlier records are safe.

    Args:
        path: database file; its folder is created. `<path>.lock` is the lock of the run folder.
        read_only: take no lock and write nothing; also during a run, unless `exclusive`.
        exclusive: open with exclusive locking, without live readers; None: if several machines share the file system.

    Raises:
        BadInput: another run has locked the folder, another version wrote the file, or the file is no store.
        StoreError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, exclusive: bool | None = None) -> None:
        self._path = Path(path)
        self._exclusive = needs_exclusive(self._path) if exclusive is None else exclusive
        self._ends_log = self._exclusive and not read_only
        self._lock: RunLock | None = None
        self._one_at_a_time = threading.RLock()
        self._log_bytes = 0
        self._copying: Future[None] | None = None
        if read_only:
            if not self._path.is_file():
                raise refusal(str(self._path), "the store of a run", "no file", "check the run's folder")
        else:
            with self._store_errors("make the folder"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = RunLock(lock_of(self._path))
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        with ExitStack() as stack:  # closed again if the file is refused
            if self._lock is not None:
                stack.callback(self._lock.close)
            self._database = connect(self._path, read_only=read_only, exclusive=self._exclusive)
            stack.callback(self._database.close)
            self._prepare(read_only)
            stack.pop_all()

    def _prepare(self, read_only: bool) -> None:
        with self._store_errors("open"):
            version = version_of(self._path, self._database)
            if not read_only:  # an exclusive store has no log after it is closed
                self._database.execute("PRAGMA journal_mode = WAL")
            check_pages(self._path, self._database)
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("PRAGMA wal_autocheckpoint = 0")
        if version == 0 and read_only:
            advice = "wait until the run has begun, or check the folder"
            raise refusal(str(self._path), "the store of a run", "one in which nothing was recorded", advice)
        if version == 0:
            with self._transaction():
                create_tables(self._database)
        # rows up to these were written by earlier processes
        self._earlier = {
            table: self._rows(f"SELECT coalesce(max(row), 0) FROM {table}")[0][0] for table in ("turns", "log")
        }

    # --- turns, groups, rollouts ---

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: Sequence[LogEntry] = ()) -> None:
        """Record new segments of unfinished trajectories (a rollout's policy trajectory has the rollout's id) and
        entries of the log, in one transaction. `append` drops the turns of its group, which contains them.

        Raises:
            TypeError: a tool call's arguments, or an entry's data, are not plain data.
        """
        rows = [(rollout, encode(tuple(segments))) for rollout, segments in turns]
        logged = [(entry.stage, entry.kind, entry.name, encode(dict(entry.data))) for entry in entries]
        with self._transaction(sum(len(row[-1]) for row in (*rows, *logged))):
            if rows:
                self._database.executemany("INSERT INTO turns (rollout, data) VALUES (?, ?)", rows)
            if logged:
                insert = "INSERT INTO log (stage, kind, name, data) VALUES (?, ?, ?, ?)"
                self._database.executemany(insert, logged)

    def turns(self, rollout: str) -> list[Segment]:
        rows = self._rows("SELECT data FROM turns WHERE rollout = ? ORDER BY row", rollout)
        return [segment for (data,) in rows for segment in self._decode(data, tuple[Segment, ...])]

    def trajectories(self, rollout: str) -> list[str]:
        query = "SELECT DISTINCT rollout FROM turns WHERE rollout = ? OR (rollout > ? AND rollout < ?) ORDER BY rollout"
        return [name for (name,) in self._rows(query, rollout, *_prefix_bounds(rollout))]

    def append(self, *groups: Group, stage: str) -> None:
        """Record scored groups with their rollouts, in one transaction.

        Raises:
            StoreError: the stage already has a group of the same index that is not superseded.
        """
        encoded = [(group, encode(StoredGroup.of(group)), _rollout_rows(group)) for group in groups]
        num_bytes = sum(len(data) + sum(len(row[-1]) for row in rollouts) for _, data, rollouts in encoded)
        with self._transaction(num_bytes):
            for group, data, rollouts in encoded:
                insert = "INSERT INTO groups (stage, number, data) VALUES (?, ?, ?)"
                row = self._database.execute(insert, (stage, group.index, data)).lastrowid
                self._database.executemany(
                    "INSERT INTO rollouts (in_group, id, failed, outcome, reason, error, reward, data)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [(row, *rollout) for rollout in rollouts],
                )
                trajectory_ids = [
                    (trajectory.id,)
                    for rollout in (*group.rollouts, *group.failed)
                    for trajectory in rollout.trajectories
                ]
                self._database.executemany("DELETE FROM turns WHERE rollout = ?", trajectory_ids)

    def groups(self, *, stage: str, first: int = 0, end: int | None = None) -> Iterator[Group]:
        """Yield a stage's groups that are not superseded, in admission order, from index `first` up to, but not
        including, `end`. Groups are read one by one, so a long run fits into memory."""
        query = "SELECT row FROM groups WHERE superseded = 0 AND stage = ? AND number >= ? AND number < ?"
        for (row,) in self._rows(f"{query} ORDER BY number", stage, first, MOST if end is None else end):
            yield self._group(row)

    def _group(self, row: int) -> Group:
        stored = self._decode(self._rows("SELECT data FROM groups WHERE row = ?", row)[0][0], StoredGroup)
        rollouts: tuple[list[Rollout], list[Rollout]] = ([], [])
        for failed, data in self._rows("SELECT failed, data FROM rollouts WHERE in_group = ? ORDER BY row", row):
            rollouts[failed].append(self._decode(data, StoredRollout).rollout(stored.task))
        group: Group = stored.group(*rollouts)
        return group

    def load(self, rollout: str) -> Rollout:
        """Return a rollout of a recorded group, the latest one if a resumed run repeated it.

        Raises:
            BadInput: no recorded group has a rollout of this id.
        """
        rows = self._rows(
            "SELECT rollouts.data, groups.data FROM rollouts JOIN groups ON groups.row = in_group"
            " WHERE id = ? ORDER BY rollouts.row DESC LIMIT 1",
            rollout,
        )
        if not rows:
            available = [i for (i,) in self._rows("SELECT id FROM rollouts ORDER BY row LIMIT 3")]
            others = f"(there are {', '.join(available)}, ...)" if available else "in a run without rollouts"
            name = f"{rollout!r} {others}"
            raise refusal(str(self._path), "the id of a recorded rollout", name, "take one from the report")
        task = self._decode(rows[0][1], StoredGroup).task
        loaded: Rollout = self._decode(rows[0][0], StoredRollout).rollout(task)
        return loaded

    # --- the log ---

    def record(self, *entries: LogEntry) -> None:
        self.append_turns((), entries)

    def entries(
        self, stage: str, *, after: int = 0, kinds: Collection[LogKind] | None = None, name: str | None = None
    ) -> Iterator[tuple[int, LogEntry]]:
        """Yield (row, entry) of a stage's log entries that are not superseded, in order. They are read a few hundred at
        a time, so a long log fits into memory.

        Args:
            after: only entries after this row are read.
            kinds: kinds to yield; None: all.
            name: only entries about this id; an index finds them, so that the log's length does not matter. None: all.
        """
        kind_names = sorted(kinds) if kinds is not None else []
        query = (
            "SELECT row, kind, name, data FROM log WHERE row > ? AND superseded = 0 AND stage = ?"
            + (" AND name = ?" if name is not None else "")
            + (f" AND kind IN ({', '.join('?' * len(kind_names))})" if kinds is not None else "")
            + f" ORDER BY row LIMIT {READ_AT_ONCE}"
        )
        rows: list[Any] = [(after,)]
        while rows:
            rows = self._rows(query, rows[-1][0], stage, *([] if name is None else [name]), *kind_names)
            for row, kind, about, data in rows:
                yield row, LogEntry(stage=stage, kind=kind, name=about, data=self._decode(data, dict[str, Any]))

    def forget(self, rollout: str) -> int:
        """Drop the turns and log entries of an unfinished rollout, including its attempts and roles, before it starts
        over; return their number."""
        count = 0
        with self._transaction():
            for _, column, change in DROPS:
                count += self._database.execute(f"{change} WHERE {column} = ?", (rollout,)).rowcount
                count += self._database.execute(
                    f"{change} WHERE {column} >= ? AND {column} < ?", _prefix_bounds(rollout)
                ).rowcount
        return count

    # --- metrics, events, pairs ---

    def metric(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        data = encode(dict(values))
        with self._transaction(len(data)):
            self._database.execute("INSERT INTO metrics (stage, step, data) VALUES (?, ?, ?)", (stage, step, data))

    def metrics(self, stage: str, *, after: int = -1) -> list[tuple[int, dict[str, float]]]:
        query = "SELECT step, data FROM metrics WHERE superseded = 0 AND stage = ? AND step > ? ORDER BY step, row"
        return [(step, self._decode(data, dict[str, float])) for step, data in self._rows(query, stage, after)]

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        """Record an event with the current time."""
        data = msgspec.json.encode({"event": text, **facts}).decode()
        with self._transaction(len(data)):
            insert = "INSERT INTO events (time, stage, text) VALUES (?, ?, ?)"
            self._database.execute(insert, (time.time(), stage, data))

    def events(self) -> list[dict[str, Any]]:
        rows = self._rows("SELECT time, stage, text FROM events ORDER BY row")
        return [{"time": when, "stage": stage, **msgspec.json.decode(data)} for when, stage, data in rows]

    def put(self, key: str, value: Any) -> None:
        data = encode(value)
        with self._transaction(len(data)):
            self._database.execute("INSERT OR REPLACE INTO pairs (key, data) VALUES (?, ?)", (key, data))

    def get(self, key: str) -> Any | None:
        rows = self._rows("SELECT data FROM pairs WHERE key = ?", key)
        return self._decode(rows[0][0], Any) if rows else None

    # --- checkpoints and resume ---

    def checkpoint(self, ref: CheckpointRef, state: Mapping[str, Any]) -> None:
        """Record that a checkpoint's folder is complete, with the state for a resume. Durable against a power cut.

        Raises:
            StoreError: the folder does not exist.
        """
        if not Path(ref.path).is_dir():
            raise StoreError(f"{ref.path}: expected the complete folder of a checkpoint, got nothing; write it first")
        rows = (ref.stage, ref.step, encode(ref), encode(dict(state)))
        with self._one_at_a_time:
            self._database.execute("PRAGMA synchronous = FULL")
            try:
                with self._transaction(len(rows[3])):
                    replaced = "UPDATE checkpoints SET superseded = 1 WHERE stage = ? AND step = ? AND superseded = 0"
                    self._database.execute(replaced, rows[:2])
                    insert = "INSERT INTO checkpoints (stage, step, ref, state) VALUES (?, ?, ?, ?)"
                    self._database.execute(insert, rows)
            finally:
                self._database.execute("PRAGMA synchronous = NORMAL")

    def last_checkpoint(self, stage: str) -> tuple[CheckpointRef, Mapping[str, Any]] | None:
        """Return the latest checkpoint with an existing folder, and its state; None if there is no such checkpoint."""
        query = (
            "SELECT row, step, ref FROM checkpoints WHERE superseded = 0 AND stage = ? AND step < ?"
            " ORDER BY step DESC LIMIT 1"
        )
        rows = self._rows(query, stage, MOST)
        while rows:  # one at a time, because a state may be large
            row, step, data = rows[0]
            ref = self._decode(data, CheckpointRef)
            if Path(ref.path).is_dir():
                ((state,),) = self._rows("SELECT state FROM checkpoints WHERE row = ?", row)
                return ref, self._decode(state, dict[str, Any])
            rows = self._rows(query, stage, step)
        return None

    def checkpoints(self, stage: str) -> list[CheckpointRef]:
        """Return the checkpoints that are not superseded and have an existing folder, by step."""
        query = "SELECT ref FROM checkpoints WHERE superseded = 0 AND stage = ? ORDER BY step, row"
        refs = [self._decode(data, CheckpointRef) for (data,) in self._rows(query, stage)]
        return [ref for ref in refs if Path(ref.path).is_dir()]

    def retire(self, stage: str, steps: Collection[int]) -> None:
        """Mark checkpoints whose folders were deleted as superseded. Their states are dropped, so that the store does
        not grow without bound."""
        with self._transaction():
            change = "UPDATE checkpoints SET superseded = 1, state = x'' WHERE stage = ? AND step = ?"
            self._database.executemany(change, [(stage, step) for step in steps])

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Go back to the end of `step`, in one transaction: later metrics and checkpoints are marked as superseded, but
        stay in the file.

        Args:
            first_group: index of the first group that is superseded. The turns and log entries that an earlier process
                left of this and later groups' rollouts are dropped, and so are that process's log entries of later
                steps. None: keep all groups.
        """
        with self._transaction():
            run = self._database.execute
            run("UPDATE metrics SET superseded = 1 WHERE stage = ? AND step > ?", (stage, step))
            run("UPDATE checkpoints SET superseded = 1 WHERE stage = ? AND step > ?", (stage, step))
            if first_group is None:
                return
            run("UPDATE groups SET superseded = 1 WHERE stage = ? AND number >= ?", (stage, first_group))
            for table, column, change in DROPS:
                earlier = self._earlier[table]
                names = f"SELECT DISTINCT {column} FROM {table} WHERE {column} >= ? AND {column} < ? AND row <= ?"
                for (name,) in run(names, (*_prefix_bounds(stage), earlier)).fetchall():
                    number = name[len(stage) + 1 :].partition("/")[0]
                    if number.isdigit() and int(number) >= first_group:
                        run(f"{change} WHERE {column} = ? AND row <= ?", (name, earlier))
            steps = "SELECT DISTINCT name FROM log WHERE name >= ? AND name < ? AND row <= ?"
            for (name,) in run(steps, (f"{stage}@", f"{stage}A", earlier)).fetchall():  # A follows @
                if int(name.partition("@")[2]) > step:
                    run("UPDATE log SET superseded = 1 WHERE name = ? AND row <= ?", (name, earlier))

    def supersede(self, stage: str, number: int) -> None:
        with self._transaction():
            self._database.execute("UPDATE groups SET superseded = 1 WHERE stage = ? AND number = ?", (stage, number))

    def close(self) -> None:
        """Copy the log into the database and release the lock. Safe to call twice."""
        self._copier.shutdown(wait=True)
        if self._ends_log:
            self._ends_log = False
            with suppress(sqlite3.Error):  # the log then stays, for the next process
                end_log(self._database)
        self._database.close()
        if self._lock is not None:
            self._lock.close()

    # --- how it is done ---

    @contextmanager
    def _transaction(self, num_bytes: int = 256) -> Iterator[None]:
        """Commit everything that the body writes, or nothing. `num_bytes`, its approximate size, decides when the log
        is copied."""
        with self._one_at_a_time, self._store_errors("write"):
            if self._copying is not None and self._copying.done():
                failed, self._copying = self._copying.exception(), None
                if failed is not None:  # reported now, because a log that is never copied grows without bound
                    raise failed
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
            self._log_bytes += num_bytes
            if self._log_bytes > LOG_BYTES and self._copying is None:
                self._log_bytes = 0
                self._copying = self._copier.submit(self._copy_log)

    def _copy_log(self) -> None:
        """Copy the log into the database; an exclusive store has no other connection, so its writers wait."""
        if not self._exclusive:
            return copy_log(self._path)
        with self._one_at_a_time:
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @contextmanager
    def _store_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise store_error(self._path, what, error) from error

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._one_at_a_time, self._store_errors("read"):
            return self._database.execute(query, values).fetchall()

    def _decode(self, data: bytes, kind: Any) -> Any:
        try:
            return decode(data, kind)
        except msgspec.MsgspecError as error:
            problem, advice = f"damaged data ({error})", DAMAGED
            if isinstance(error, msgspec.ValidationError):
                entries = f"{error} {refused_entries(data, error)}"
                problem = f"a value of another type ({entries:.300})"
                advice = "the file is whole: report this as a defect of Sparring"
            name = getattr(kind, "__name__", kind)
            raise StoreError(f"{self._path}: expected {name}, got {problem}; {advice}") from error


def _prefix_bounds(name: str) -> tuple[str, str]:
    """Return the bounds of all names that begin with `name` and a slash: the first such name, and the first name after
    them."""
    return f"{name}/", f"{name}0"  # 0 follows the slash


def _rollout_rows(group: Group) -> list[tuple[Any, ...]]:
    """Return rows of the table `rollouts` (id, failed, outcome, reason, error, reward, data), without `in_group`:
    scored rollouts, then failed ones."""
    rows = []
    for rollout, score in zip_longest((*group.rollouts, *group.failed), group.scores):
        outcome = rollout.outcome
        error = outcome.failure.error if outcome.failure else None
        facts = (int(score is None), outcome.kind, outcome.reason, error, score.reward if score else None)
        rows.append((rollout.id, *facts, encode(StoredRollout.of(rollout, group.task))))
    return rows
