"""The run's durable record in one SQLite file.

Crash safety. Every method is one transaction in write-ahead-log mode, so after kill -9 it happened or it did not.
`synchronous = NORMAL` leaves the log's pages with the kernel at commit: they survive the death of this process, not a
power cut. A checkpoint manifest is committed with `FULL`, which also makes everything before it durable on the disk.

Speed. A commit is a few writes into the kernel's page cache (tens of microseconds), short enough for the event loop.
The one slow thing, copying the log into the database with its fsync, happens on a thread with its own connection.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sparring.errors import StoreError, refusal
from sparring.log import LogEntry, LogKind
from sparring.store.advice import DAMAGED, way_out
from sparring.store.codec import SCHEMA_VERSION, StoredGroup, StoredRollout, decode, encode
from sparring.store.cut import check_header, check_pages
from sparring.store.lock import RunLock
from sparring.store.schema import OLDEST, migrate
from sparring.types import CheckpointRef, Group, Rollout, Score, Segment

DROPS = (("turns", "rollout", "DELETE FROM turns"), ("log", "name", "UPDATE log SET superseded = 1"))
"""Tables with what concerns one rollout, the column with its id, and how rows are dropped."""

MOST = 1 << 62
"""Above every number of a group and every step."""

READ_AT_ONCE = 256
"""Entries of the log that are read with one query."""

LOG_BYTES = 8 << 20
"""After this much was written, the write-ahead log is copied into the database."""


class SqliteStore:
    """Implements `protocols.Store` on one file. One writer per folder; readers (report, replay) open with `read_only`.

    Args:
        path: the database file; its folder is made. `<path>.lock` is the lock of the run folder.
        read_only: take no lock and write nothing. A live run may be read.

    Raises:
        BadInput: another run holds the folder, or the file is a newer version's or no store at all.
        StoreError: the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self._path = Path(path)
        self._lock: RunLock | None = None
        self._one_at_a_time = threading.RLock()
        self._log_bytes = 0
        self._copying: Future[None] | None = None
        if read_only:
            if not self._path.is_file():
                raise refusal(str(self._path), "the store of a run", "no file", "check the run's folder")
        else:
            with self._translated("make the folder"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = RunLock(self._path.with_name(self._path.name + ".lock"))
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        with ExitStack() as opened:  # closed again where it cannot be used
            if self._lock is not None:
                opened.callback(self._lock.close)
            self._database = _connect(self._path, read_only=read_only)
            opened.callback(self._database.close)
            self._prepare(read_only)
            opened.pop_all()

    def _prepare(self, read_only: bool) -> None:
        """Make the connection's settings, and the tables where the file is new."""
        with self._translated("open"):
            try:
                version = self._database.execute("PRAGMA user_version").fetchone()[0]
                if version == 0 and not read_only:
                    self._database.execute("PRAGMA journal_mode = WAL")
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorname", "") != "SQLITE_NOTADB":
                    raise
                do = "restore it from a copy, or move it away"
                raise refusal(str(self._path), "a SQLite database", "another kind of file", do) from error
            check_pages(self._path, self._database)
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("PRAGMA wal_autocheckpoint = 0")
        if version == 0 and read_only:
            do = "wait until the run has begun, or check the folder"
            raise refusal(str(self._path), "the store of a run", "one in which nothing was recorded", do)
        if version and not OLDEST <= version <= SCHEMA_VERSION:
            raise refusal(
                str(self._path),
                f"a store of version {OLDEST} to {SCHEMA_VERSION}",
                f"version {version}",
                "read it with the Sparring that wrote it, or start a new run folder",
            )
        if version < SCHEMA_VERSION and not read_only:
            with self._transaction():
                migrate(self._database, version)
        self._has_log = not read_only or version >= 5  # of a file that is only read, the tables stay as they are
        # rows up to these are of earlier processes
        tables = ("turns", "log") if self._has_log else ("turns",)
        self._earlier = {table: self._rows(f"SELECT coalesce(max(row), 0) FROM {table}")[0][0] for table in tables}

    # --- turns, groups, rollouts ---

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: Sequence[LogEntry] = ()) -> None:
        """Record new segments of trajectories in flight (a rollout's policy trajectory bears the rollout's id) and
        entries of the log, all or none. Turns are dropped when their group, which holds them all, is appended.

        Raises:
            StoreError: the disk is full or broken; nothing was written and nothing written before is lost.
            TypeError: a tool call's arguments, or an entry's data, are no plain data.
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
        """Return the recorded segments of a rollout that is in flight or was cut off: its group was not appended."""
        rows = self._rows("SELECT data FROM turns WHERE rollout = ? ORDER BY row", rollout)
        return [segment for (data,) in rows for segment in self._decoded(data, tuple[Segment, ...])]

    def trajectories(self, rollout: str) -> list[str]:
        """Return the ids of a rollout's trajectories that have turns: its own id, and those that begin with it and a
        slash."""
        query = "SELECT DISTINCT rollout FROM turns WHERE rollout = ? OR (rollout > ? AND rollout < ?) ORDER BY rollout"
        return [name for (name,) in self._rows(query, rollout, f"{rollout}/", f"{rollout}0")]  # 0 follows the slash

    def append(self, *groups: Group, stage: str) -> None:
        """Record scored groups with their rollouts, all or none.

        Raises:
            StoreError: as `append_turns`, or this stage already has a group of that index that is not superseded.
        """
        encoded = [(group, encode(StoredGroup.of(group)), _encoded_rollouts(group)) for group in groups]
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
                done = [
                    (trajectory.id,)
                    for rollout in (*group.rollouts, *group.failed)
                    for trajectory in rollout.trajectories
                ]
                self._database.executemany("DELETE FROM turns WHERE rollout = ?", done)

    def groups(self, *, stage: str | None = None, first: int = 0, end: int | None = None) -> Iterator[Group]:
        """Yield the groups that count, by admission; of all stages (in the order their first group was written) when
        `stage` is None. They are read one by one, so a long run fits into memory.

        Args:
            stage: of the run.
            first: groups of the stage before this one are left out, and not read.
            end: so are this one and later ones.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        if stage is None:
            rows = self._rows("SELECT row, stage, number FROM groups WHERE superseded = 0")
            begun = {name: row for row, name, _ in reversed(rows)}
            for row, _, _ in sorted(rows, key=lambda r: (begun[r[1]], r[2])):
                yield self._group(row)
            return
        query = "SELECT row FROM groups WHERE superseded = 0 AND stage = ? AND number >= ? AND number < ?"
        for (row,) in self._rows(f"{query} ORDER BY number", stage, first, MOST if end is None else end):
            yield self._group(row)

    def _group(self, row: int) -> Group:
        """Return one group with its rollouts."""
        stored = self._decoded(self._rows("SELECT data FROM groups WHERE row = ?", row)[0][0], StoredGroup)
        rollouts: tuple[list[Rollout], list[Rollout]] = ([], [])
        for failed, data in self._rows("SELECT failed, data FROM rollouts WHERE in_group = ? ORDER BY row", row):
            rollouts[failed].append(self._decoded(data, StoredRollout).rollout(stored.task))
        group: Group = stored.group(*rollouts)
        return group

    def load(self, rollout: str) -> Rollout:
        """Return a rollout of an appended group, the latest one where a resumed run did it again.

        Raises:
            BadInput: there is none of that id.
        """
        rows = self._rows(
            "SELECT rollouts.data, groups.data FROM rollouts JOIN groups ON groups.row = in_group"
            " WHERE id = ? ORDER BY rollouts.row DESC LIMIT 1",
            rollout,
        )
        if not rows:
            available = [i for (i,) in self._rows("SELECT id FROM rollouts ORDER BY row LIMIT 3")]
            got = (
                f"{rollout!r} (there are {', '.join(available)}, ...)"
                if available
                else f"{rollout!r} in a run without rollouts"
            )
            raise refusal(str(self._path), "the id of a recorded rollout", got, "take one from the report")
        stored: StoredRollout = self._decoded(rows[0][0], StoredRollout)
        return stored.rollout(self._decoded(rows[0][1], StoredGroup).task)

    # --- the log ---

    def record(self, *entries: LogEntry) -> None:
        """Record entries of the log, all or none, in this order. Raises StoreError and TypeError as `append_turns`."""
        self.append_turns((), entries)

    def entries(
        self, stage: str, *, after: int = 0, kinds: Collection[LogKind] | None = None, name: str | None = None
    ) -> Iterator[tuple[int, LogEntry]]:
        """Yield the entries of a stage that count, in the order they were recorded, each with its row. They are read a
        few hundred at a time, so a long log fits into memory.

        Args:
            stage: of the run.
            after: rows up to this are left out.
            kinds: yield only these.
            name: yield only those about this id; found by an index, whatever the length of the log.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        wanted = sorted(kinds) if kinds is not None else []
        query = (
            "SELECT row, kind, name, data FROM log WHERE row > ? AND superseded = 0 AND stage = ?"
            + (" AND name = ?" if name is not None else "")
            + (f" AND kind IN ({', '.join('?' * len(wanted))})" if kinds is not None else "")
            + f" ORDER BY row LIMIT {READ_AT_ONCE}"
        )
        rows: list[Any] = [(after,)] if self._has_log else []
        while rows:
            rows = self._rows(query, rows[-1][0], stage, *([] if name is None else [name]), *wanted)
            for row, kind, about, data in rows:
                yield row, LogEntry(stage=stage, kind=kind, name=about, data=self._decoded(data, dict[str, Any]))

    def forget(self, rollout: str) -> int:
        """Let the turns and the log entries of an unfinished rollout, and of its attempts and roles, count no longer:
        it starts over. Return how many those were. Raises StoreError as `append_turns`."""
        count = 0
        with self._transaction():
            for _, column, change in DROPS:
                count += self._database.execute(f"{change} WHERE {column} = ?", (rollout,)).rowcount
                count += self._database.execute(
                    f"{change} WHERE {column} >= ? AND {column} < ?", _below(rollout)
                ).rowcount
        return count

    # --- metrics, events, pairs ---

    def metric(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step. Raises StoreError as `append_turns`."""
        data = encode(dict(values))
        with self._transaction(len(data)):
            self._database.execute("INSERT INTO metrics (stage, step, data) VALUES (?, ?, ?)", (stage, step, data))

    def metrics(self, stage: str, *, after: int = -1) -> list[tuple[int, dict[str, float]]]:
        """Return (step, values) of every step above `after` that counts, in order."""
        query = "SELECT step, data FROM metrics WHERE superseded = 0 AND stage = ? AND step > ? ORDER BY step, row"
        return [(step, self._decoded(data, dict[str, float])) for step, data in self._rows(query, stage, after)]

    def event(self, stage: str, text: str) -> None:
        """Record something that happened, with the time. Raises StoreError as `append_turns`."""
        with self._transaction(len(text)):
            insert = "INSERT INTO events (time, stage, text) VALUES (?, ?, ?)"
            self._database.execute(insert, (time.time(), stage, text))

    def events(self) -> list[tuple[float, str, str]]:
        """Return (seconds since the epoch, stage, text) of every event, in order."""
        return self._rows("SELECT time, stage, text FROM events ORDER BY row")

    def put(self, key: str, value: Any) -> None:
        """Set a key, replacing what it held. Raises StoreError as `append_turns`, TypeError for other than plain
        data."""
        data = encode(value)
        with self._transaction(len(data)):
            self._database.execute("INSERT OR REPLACE INTO pairs (key, data) VALUES (?, ?)", (key, data))

    def get(self, key: str) -> Any | None:
        """Return what a key holds, None where it was never put."""
        rows = self._rows("SELECT data FROM pairs WHERE key = ?", key)
        return self._decoded(rows[0][0], Any) if rows else None

    # --- checkpoints and resume ---

    def checkpoint(self, ref: CheckpointRef, state: Mapping[str, Any]) -> None:
        """Record that a checkpoint's folder is complete, with what a resume needs beside it. Durable against a power
        cut.

        Raises:
            StoreError: as `append_turns`, or the folder is not there.
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
        """Return the checkpoint of the highest step whose folder still exists, and its state; None without one."""
        query = (
            "SELECT row, step, ref FROM checkpoints WHERE superseded = 0 AND stage = ? AND step < ?"
            " ORDER BY step DESC LIMIT 1"
        )
        rows = self._rows(query, stage, MOST)
        while rows:  # one by one: the state of each may be large
            row, step, data = rows[0]
            ref = self._decoded(data, CheckpointRef)
            if Path(ref.path).is_dir():
                ((state,),) = self._rows("SELECT state FROM checkpoints WHERE row = ?", row)
                return ref, self._decoded(state, dict[str, Any])
            rows = self._rows(query, stage, step)
        return None

    def checkpoints(self, stage: str) -> list[CheckpointRef]:
        """Return the checkpoints that count and whose folder still exists, by step."""
        query = "SELECT ref FROM checkpoints WHERE superseded = 0 AND stage = ? ORDER BY step, row"
        refs = [self._decoded(data, CheckpointRef) for (data,) in self._rows(query, stage)]
        return [ref for ref in refs if Path(ref.path).is_dir()]

    def retire(self, stage: str, steps: Collection[int]) -> None:
        """Let checkpoints count no longer whose folders were deleted, and drop their states: what is left is few and
        small however many were saved. Raises StoreError as `append_turns`."""
        with self._transaction():
            change = "UPDATE checkpoints SET superseded = 1, state = x'' WHERE stage = ? AND step = ?"
            self._database.executemany(change, [(stage, step) for step in steps])

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Go back to the end of `step`: later metrics and checkpoints no longer count; they stay in the file. One
        transaction.

        Args:
            stage: of the run.
            step: the last one that counts.
            first_group: groups from this one on are superseded too; the turns and log entries of their rollouts, and
                the log entries of later steps, that an earlier process left are dropped. None keeps all groups.

        Raises:
            StoreError: as `append_turns`.
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
                for (name,) in run(names, (*_below(stage), earlier)).fetchall():
                    number = name[len(stage) + 1 :].partition("/")[0]
                    if number.isdigit() and int(number) >= first_group:
                        run(f"{change} WHERE {column} = ? AND row <= ?", (name, earlier))
            steps = "SELECT DISTINCT name FROM log WHERE name >= ? AND name < ? AND row <= ?"
            for (name,) in run(steps, (f"{stage}@", f"{stage}A", earlier)).fetchall():  # A follows @
                if int(name.partition("@")[2]) > step:
                    run("UPDATE log SET superseded = 1 WHERE name = ? AND row <= ?", (name, earlier))

    def supersede(self, stage: str, number: int) -> None:
        """Let one group count no longer, because it is done again; it stays in the file. Raises StoreError as
        `append_turns`."""
        with self._transaction():
            self._database.execute("UPDATE groups SET superseded = 1 WHERE stage = ? AND number = ?", (stage, number))

    def close(self) -> None:
        """Copy the log into the database and let the next run in. Safe to call twice."""
        self._copier.shutdown(wait=True)
        self._database.close()
        if self._lock is not None:
            self._lock.close()

    # --- how it is done ---

    @contextmanager
    def _transaction(self, num_bytes: int = 256) -> Iterator[None]:
        """Write all that the body writes, or nothing. `num_bytes`, about its size, decides when the log is copied."""
        with self._one_at_a_time, self._translated("write"):
            if self._copying is not None and self._copying.done():
                failed, self._copying = self._copying.exception(), None
                if failed is not None:  # say so now: a log that is never copied grows without bound
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
                self._copying = self._copier.submit(_copy_log, self._path)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Raise SQLite's and the system's errors in the body as StoreError."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self._path}: expected to {what}, got {error}; {way_out(error)}") from error

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._one_at_a_time, self._translated("read"):
            return self._database.execute(query, values).fetchall()

    def _decoded(self, data: bytes, kind: Any) -> Any:
        try:
            return decode(data, kind)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"{self._path}: expected {getattr(kind, '__name__', kind)}, got damaged data ({error}); {DAMAGED}"
            ) from error


def _below(name: str) -> tuple[str, str]:
    """Return the bounds of all names that begin with `name` and a slash: from the first on, before the second."""
    return f"{name}/", f"{name}0"  # 0 follows the slash


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection without implicit transactions. It waits 5 seconds for another one's."""
    try:
        check_header(path)
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=5.0,
        )
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{path}: expected a file to write, got {error}; check the folder and the disk") from error


def _copy_log(path: Path) -> None:
    """Move the write-ahead log into the database. Passive: it never makes a writer wait."""
    connection = _connect(path)
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    finally:
        connection.close()


def _encoded_rollouts(group: Group) -> list[tuple[Any, ...]]:
    """Return rows of the table `rollouts` without `in_group`: those with a score, then those that left the group."""
    scores: list[Score | None] = [*group.scores, *(None for _ in group.failed)]
    return [
        _rollout_row(rollout, score, encode(StoredRollout.of(rollout, group.task)))
        for rollout, score in zip((*group.rollouts, *group.failed), scores, strict=True)
    ]


def _rollout_row(rollout: Rollout, score: Score | None, data: bytes) -> tuple[Any, ...]:
    """Return a row: id, failed, outcome, reason, error, reward, data."""
    outcome = rollout.outcome
    error = outcome.failure.error if outcome.failure else None
    reward = score.reward if score else None
    return (rollout.id, int(score is None), outcome.kind, outcome.reason, error, reward, data)
