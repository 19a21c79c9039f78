"""Advice to the user about errors of the store."""

from __future__ import annotations

import sqlite3

AGAIN = "then run the same command again: nothing recorded before is lost"
DAMAGED = "the file is damaged: restore it from a copy, or start a new run folder"

WAY_OUT = {
    "SQLITE_FULL": f"free disk space, {AGAIN}",
    "SQLITE_IOERR": f"free disk space or check the disk, {AGAIN}",
    "SQLITE_CANTOPEN": f"check the folder and the disk, {AGAIN}",
    "SQLITE_READONLY": f"make the file and its folder writable, {AGAIN}",
    "SQLITE_BUSY": f"end the program that holds the file, {AGAIN}",
    "SQLITE_LOCKED": f"end the program that holds the file, {AGAIN}",
    "SQLITE_CORRUPT": DAMAGED,
    "SQLITE_NOTADB": DAMAGED,
    "SQLITE_CONSTRAINT": "it is already recorded and nothing was written: report this as a defect of Sparring",
}
"""Advice by prefix of SQLite's error code (`sqlite.org/rescode.html`)."""


def way_out(error: sqlite3.Error | OSError) -> str:
    """Return advice on an error: that of `WAY_OUT`, or else to report a bug."""
    if isinstance(error, OSError):
        return f"free disk space or check the folder and the disk, {AGAIN}"
    code = getattr(error, "sqlite_errorname", "")
    return next((way for name, way in WAY_OUT.items() if code.startswith(name)), "report this as a defect of Sparring")
