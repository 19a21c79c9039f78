"""Errors of the store, with advice to the user."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sparring.disk import shortage
from sparring.errors import StoreError

AGAIN = "then run the same command again: nothing recorded before is lost"
DAMAGED = "the file is damaged: restore it from a copy, or start a new run folder"

WAY_OUT = {
    "SQLITE_FULL": f"free disk space, {AGAIN}",
    "SQLITE_IOERR": f"check the disk, {AGAIN}",
    "SQLITE_CANTOPEN": f"check the folder and the disk, {AGAIN}",
    "SQLITE_READONLY": f"make the file and its folder writable, {AGAIN}",
    "SQLITE_BUSY": f"end the program that holds the file, {AGAIN}",
    "SQLITE_LOCKED": f"end the program that holds the file, {AGAIN}",
    "SQLITE_CORRUPT": DAMAGED,
    "SQLITE_NOTADB": DAMAGED,
    "SQLITE_CONSTRAINT": "it is already recorded and nothing was written: report this as a defect of Sparring",
}
"""Advice by prefix of SQLite's error code (`sqlite.org/rescode.html`)."""


def store_error(path: Path, what: str, error: sqlite3.Error | OSError) -> StoreError:
    """Return a StoreError that names what the disk or the process lacks, or the defect of the file.

    Args:
        path: file or folder of the store.
        what: the action that failed, as an infinitive.
    """
    code = getattr(error, "sqlite_errorname", "SQLITE_CANTOPEN")
    ways = (way for name, way in WAY_OUT.items() if code.startswith(name))
    advice = next(ways, "report this as a defect of Sparring")
    lacking = shortage(error, path) if advice.endswith(AGAIN) else None
    if lacking is not None:
        return StoreError(f"{path}: expected to {what}, got {lacking[0]} ({error}); {lacking[1]}, {AGAIN}")
    return StoreError(f"{path}: expected to {what}, got {error}; {advice}")
