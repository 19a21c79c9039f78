"""Detection of truncated store files. SQLite reads a missing page as zeros. It takes an empty file for a new database,
and deletes the write-ahead log next to it."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

from sparring.errors import StoreError
from sparring.store.advice import DAMAGED

HEADER_BYTES = 100
"""Size of a database's header (sqlite.org/fileformat2.html, 1.3)."""

CHANGED, NUM_PAGES, VALID_FOR = slice(24, 28), slice(28, 32), slice(92, 96)
"""Fields of the header: change counter, number of pages, and the change counter that the number of pages belongs to."""

LOG_HEADER = struct.Struct(">8I")
FRAME_HEADER = struct.Struct(">6I")
"""Headers of a write-ahead log and of its frames (sqlite.org/fileformat2.html, 4.1). Both contain two words of salt; in
a valid frame they equal the words of its log."""

LOCK_BYTE = 1 << 30
"""Byte offset of the page that is never written (sqlite.org/fileformat2.html, 1.3.1)."""


def check_header(path: Path) -> None:
    """Refuse a database that lost its beginning, before SQLite opens it. An empty file without a log is new.

    Raises:
        StoreError: the database lost its beginning.
    """
    log = _log(path)
    size = path.stat().st_size if path.exists() else 0
    logged = log.exists() and log.stat().st_size > 0
    if 0 < size < HEADER_BYTES or size == 0 and logged:
        raise StoreError(f"{path}: expected a database, got the first {size} bytes of one; {DAMAGED}")


def check_pages(path: Path, database: sqlite3.Connection) -> None:
    """Refuse a database with pages that are in neither the file nor the log, or with more pages than its log knows,
    which means that the log was truncated.

    Raises:
        StoreError: a page is missing, or the log was truncated.
    """
    with path.open("rb") as file:  # before the log is read: a live writer copies pages from the log to the file
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
