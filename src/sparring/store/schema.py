"""Tables of the store, and how a file of an older schema becomes one of this."""

from __future__ import annotations

import sqlite3

from sparring.store.codec import SCHEMA_VERSION

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
    state BLOB NOT NULL, superseded INTEGER NOT NULL DEFAULT 0)
"""
"""Tables of schema 4, the oldest that is read."""

LOG = """
CREATE TABLE log (row INTEGER PRIMARY KEY, stage TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    data BLOB NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE INDEX log_by_name ON log (name);
CREATE INDEX checkpoints_by_stage ON checkpoints (stage, step)
"""

SEGMENTS = ""
"""Of schema 6: segments say more, and a turn's are numbered by the places of their requests. Rows of before are read as
they are."""

SHARED = ""
"""Of schema 7: a conversation that leaves another holds the ids behind those that both have. Rows of before are read as
they are."""

MIGRATIONS = {4: TABLES, 5: LOG, 6: SEGMENTS, 7: SHARED}
"""By schema, the statements that make it of the one before."""

OLDEST = min(MIGRATIONS)


def migrate(database: sqlite3.Connection, version: int) -> None:
    """Bring a database from schema `version` (0: an empty file) to the present one, within the open transaction.

    Raises:
        sqlite3.Error: a statement failed.
    """
    for schema in range(version + 1 if version else OLDEST, SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[schema].split(";"):
            database.execute(statement)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
