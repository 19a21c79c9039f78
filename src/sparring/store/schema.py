"""Tables of the store, and the refusal of a store of another version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sparring.errors import refusal
from sparring.store.codec import SCHEMA_VERSION

BEFORE = 7
"""Last version of a store before 0.1.0. The version after 1 is 8, so that each number means one format."""

TABLES = """
CREATE TABLE turns (row INTEGER PRIMARY KEY AUTOINCREMENT, rollout TEXT NOT NULL, data BLOB NOT NULL);
CREATE INDEX turns_by_rollout ON turns (rollout);
CREATE TABLE groups (row INTEGER PRIMARY KEY, stage TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX groups_once ON groups (stage, number) WHERE superseded = 0;
CREATE TABLE rollouts (row INTEGER PRIMARY KEY, id TEXT NOT NULL, in_group INTEGER NOT NULL, failed INTEGER NOT NULL,
    outcome TEXT NOT NULL, reason TEXT NOT NULL, error TEXT, reward REAL, data BLOB NOT NULL);
CREATE INDEX rollouts_by_id ON rollouts (id);
CREATE INDEX rollouts_by_group ON rollouts (in_group);
CREATE TABLE metrics (row INTEGER PRIMARY KEY, stage TEXT NOT NULL, step INTEGER NOT NULL, data BLOB NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0);
CREATE INDEX metrics_by_stage ON metrics (stage, step);
CREATE TABLE events (row INTEGER PRIMARY KEY, time REAL NOT NULL, stage TEXT NOT NULL, text TEXT NOT NULL);
CREATE TABLE pairs (key TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE checkpoints (row INTEGER PRIMARY KEY, stage TEXT NOT NULL, step INTEGER NOT NULL, ref BLOB NOT NULL,
    state BLOB NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE INDEX checkpoints_by_stage ON checkpoints (stage, step);
CREATE TABLE log (row INTEGER PRIMARY KEY, stage TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    data BLOB NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE INDEX log_by_name ON log (name)
"""


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables of an empty database, within the open transaction."""
    for statement in TABLES.split(";"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def version_of(path: Path, database: sqlite3.Connection) -> int:
    """Return the version of an open store: 0 if nothing was recorded in it, else `SCHEMA_VERSION`.

    Raises:
        BadInput: the store is of another version, or the file is no database.
    """
    try:
        version: int = database.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "") != "SQLITE_NOTADB":
            raise
        advice = "restore it from a copy, or move it away"
        raise refusal(str(path), "a SQLite database", "another kind of file", advice) from error
    if version not in (0, SCHEMA_VERSION):
        wrote = "before-0.1.0 in CHANGELOG.md" if version <= BEFORE else "a newer one"
        advice = f"go on with the Sparring that wrote it ({wrote}), or begin another run (--name)"
        raise refusal(
            str(path), f"the record of a run, of version {SCHEMA_VERSION}", f"one of version {version}", advice
        )
    return version
