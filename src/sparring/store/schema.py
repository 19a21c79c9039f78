"""Tables of the store, and migrations from older schemas."""

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
"""Tables of schema 4, the oldest that can be read."""

LOG = """
CREATE TABLE log (row INTEGER PRIMARY KEY, stage TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    data BLOB NOT NULL, superseded INTEGER NOT NULL DEFAULT 0);
CREATE INDEX log_by_name ON log (name);
CREATE INDEX checkpoints_by_stage ON checkpoints (stage, step)
"""

SEGMENTS = ""
"""Schema 6 adds fields to segments, and numbers a turn's segments by the position of their request. Older rows are read
unchanged."""

SHARED = ""
"""Schema 7 stores a branch of a conversation without its shared beginning. Older rows are read unchanged."""

MIGRATIONS = {4: TABLES, 5: LOG, 6: SEGMENTS, 7: SHARED}
"""Statements that migrate a database from the previous schema, by schema."""

OLDEST = min(MIGRATIONS)


def migrate(database: sqlite3.Connection, version: int) -> None:
    """Migrate a database from schema `version` (0: an empty file) to the current one, within the open transaction.

    Raises:
        sqlite3.Error: a statement failed.
    """
    for schema in range(version + 1 if version else OLDEST, SCHEMA_VERSION + 1):
        for statement in MIGRATIONS[schema].split(";"):
            database.execute(statement)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
