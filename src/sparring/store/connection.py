"""Connections to the database of a store.

A write-ahead log needs shared memory between its connections, in a file next to the database. On a file system of
several machines that does not work (sqlite.org/wal.html), so there a store is opened with exclusive locking. The index
of the log is then in the process's own memory: there is one connection, and no reader before it is closed.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sparring.store.advice import store_error
from sparring.store.file_system import file_system_of
from sparring.store.lock import RunLock
from sparring.store.schema import version_of
from sparring.store.truncation import check_header

LOG_VERSION = slice(18, 19)
"""Byte of the header that is 2 if the database has a write-ahead log (sqlite.org/fileformat2.html, 1.3)."""


def needs_exclusive(path: Path) -> bool:
    """Return whether a database must be opened with exclusive locking because of its file system."""
    return file_system_of(path).remote


def lock_of(path: Path) -> Path:
    """Return the lock file of a database's run folder."""
    return path.with_name(path.name + ".lock")


def connect(path: Path, *, read_only: bool = False, exclusive: bool = False) -> sqlite3.Connection:
    """Return a connection without implicit transactions. It waits up to 5 seconds for the transaction of another
    connection.

    Args:
        read_only: open an existing file for reading.
        exclusive: share no memory with other connections. Readers then come after the writer.

    Raises:
        BadInput: `read_only` and `exclusive` are set, and a run has locked the folder.
        StoreError: the file cannot be opened, or lost its beginning.
    """
    try:
        check_header(path)
        if exclusive and read_only:
            _fold_log(path)
        database = _opened_to_read(path) if read_only else _opened(path, "mode=rwc")
        if exclusive and not read_only:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
        return database
    except (sqlite3.Error, OSError) as error:
        raise store_error(path, "open a database", error) from error


def end_log(database: sqlite3.Connection) -> None:
    """Checkpoint the write-ahead log of an exclusive connection and leave WAL mode, so that a reader needs no `-shm`
    file."""
    database.execute("PRAGMA journal_mode = DELETE").fetchall()


def copy_log(path: Path) -> None:
    """Copy the write-ahead log into the database, on a connection of its own. Passive: it never blocks a writer.

    Raises:
        StoreError, sqlite3.Error: the file cannot be opened or written.
    """
    with closing(connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def copy_store(source: Path, target: Path) -> None:
    """Copy a store at its last commit; a run may be writing it.

    Raises:
        BadInput: a run has opened the store, on a file system without shared memory.
        StoreError: the store cannot be read, or the disk is full.
    """
    try:
        with (
            closing(connect(source, read_only=True, exclusive=needs_exclusive(source))) as reader,
            closing(sqlite3.connect(target)) as writer,
        ):
            reader.backup(writer)
    except (sqlite3.Error, OSError) as error:
        raise store_error(target, f"copy the store {source}", error) from error


def is_blank(path: Path) -> bool:
    """Return True if a store's file is missing, empty, or without tables.

    Raises:
        BadInput: another version wrote the file, it is no database, or a run has opened it without shared memory.
        StoreError: the database lost its beginning, or cannot be read.
    """
    check_header(path)
    if not path.exists() or path.stat().st_size == 0:
        return True
    try:
        with closing(connect(path, read_only=True, exclusive=needs_exclusive(path))) as database:
            return version_of(path, database) == 0
    except sqlite3.Error as error:
        raise store_error(path, "read a database", error) from error


def _opened(path: Path, how: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None, check_same_thread=False, timeout=5.0
    )


def _opened_to_read(path: Path) -> sqlite3.Connection:
    """Return a connection that reads. On a read-only or full disk there may be no room for shared memory
    (sqlite.org/wal.html, read-only databases); without a log none is needed, because nobody writes the file."""
    database, log = _opened(path, "mode=ro"), path.with_name(path.name + "-wal")
    try:
        database.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        if log.exists() and log.stat().st_size:
            raise
        database.close()
        database = _opened(path, "mode=ro&immutable=1")
    return database


def _fold_log(path: Path) -> None:
    """End the log that a killed run left, so that readers need no shared memory."""
    with path.open("rb") as file:
        if file.read(LOG_VERSION.stop)[LOG_VERSION] != b"\x02":
            return
    with closing(RunLock(lock_of(path), reads=True)), closing(_opened(path, "mode=rw")) as database:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        end_log(database)
