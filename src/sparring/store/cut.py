"""Files of a store that were cut. SQLite reads a page that is missing as zeros, and takes a database of no bytes for a
new one, whose write-ahead log it deletes."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from sparring.errors import StoreError
from sparring.store.advice import DAMAGED

HEADER_BYTES = 100
"""Bytes of a database's header (sqlite.org/fileformat2.html, 1.3)."""

CHANGED, NUM_PAGES, VALID_FOR = slice(24, 28), slice(28, 32), slice(92, 96)
"""Bytes of the header: a counter of changes, the number of pages, and the counter for which that number holds."""

LOG_HEADER = struct.Struct(">8I")
FRAME_HEADER = struct.Struct(">6I")
"""Headers of a write-ahead log and of its frames (sqlite.org/fileformat2.html, 4.1). Both have two words of salt, which
agree in the frames that count."""

LOCK_BYTE = 1 << 30
"""The page with this byte is never written (sqlite.org/fileformat2.html, 1.3.1)."""


def check_header(path: Path) -> None:
    """Refuse a database that lost its beginning, before SQLite opens it. A file of no bytes without a log is new.

    Args:
        path: of the database.

    Raises:
        StoreError: it lost its beginning.
        OSError: it cannot be looked at.
    """
    log = _log(path)
    size = path.stat().st_size if path.exists() else 0
    logged = log.exists() and log.stat().st_size > 0
    if 0 < size < HEADER_BYTES or size == 0 and logged:
        raise StoreError(f"{path}: expected a database, got the first {size} bytes of one; {DAMAGED}")


def is_blank(path: Path) -> bool:
    """Return True if nothing is recorded in a store's file: it is not there, has no bytes, or no tables.

    Args:
        path: of the database.

    Raises:
        StoreError: it lost its beginning, or cannot be read.
    """
    check_header(path)
    if not path.exists() or path.stat().st_size == 0:
        return True
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return bool(database.execute("PRAGMA user_version").fetchone()[0] == 0)
    except sqlite3.Error as error:
        raise StoreError(f"{path}: expected a database, got {error}; {DAMAGED}") from error


def check_pages(path: Path, database: sqlite3.Connection) -> None:
    """Refuse a database of which pages are missing: every page lies in the file or in the log. Refuse one that has more
    pages than the log knows of, too: it is younger than what is left of its log.

    Args:
        path: of the database.
        database: a connection to it.

    Raises:
        StoreError: a page is missing.
        sqlite3.Error: the database cannot be read.
        OSError: a file cannot be read.
    """
    with path.open("rb") as file:  # before the log is looked at: a live writer copies from there to here
        header = file.read(HEADER_BYTES)
    pages_of_file = int.from_bytes(header[NUM_PAGES], "big") if header[CHANGED] == header[VALID_FOR] else 0
    (num_pages,), (page_bytes,) = (
        database.execute(f"PRAGMA {pragma}").fetchone() for pragma in ("page_count", "page_size")
    )
    if pages_of_file > num_pages:
        raise StoreError(f"{path}: expected a log of {pages_of_file} pages, got one of {num_pages}; {DAMAGED}")
    if path.stat().st_size >= num_pages * page_bytes:
        return
    logged = _logged_pages(_log(path), page_bytes)
    in_file = path.stat().st_size // page_bytes  # after the log
    logged.add(LOCK_BYTE // page_bytes + 1)
    missing = next((page for page in range(in_file + 1, num_pages + 1) if page not in logged), None)
    if missing is not None:
        raise StoreError(f"{path}: expected {num_pages} pages, got none from page {missing} on; {DAMAGED}")


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _logged_pages(log: Path, page_bytes: int) -> set[int]:
    """Return the numbers of the pages that a write-ahead log has."""
    pages: set[int] = set()
    if not log.exists():
        return pages
    with log.open("rb") as data:
        header = data.read(LOG_HEADER.size)
        salt = LOG_HEADER.unpack(header)[4:6] if len(header) == LOG_HEADER.size else None
        while len(frame := data.read(FRAME_HEADER.size)) == FRAME_HEADER.size:
            page, _, *salts, _, _ = FRAME_HEADER.unpack(frame)
            if tuple(salts) != salt:
                break
            pages.add(page)
            data.seek(page_bytes, 1)
    return pages
