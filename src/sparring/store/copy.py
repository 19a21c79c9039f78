"""Copy of a store, to work on without touching the run that wrote it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sparring.errors import StoreError


def copy_store(source: Path, target: Path) -> None:
    """Copy a store as its last commit left it, while it may be written.

    Args:
        source: the file of a store.
        target: a file that does not exist.

    Raises:
        StoreError: it cannot be read, or the disk is full.
    """
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as reader,
            closing(sqlite3.connect(target)) as writer,
        ):
            reader.backup(writer)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            f"{source}: expected a store to copy to {target}, got {error}; check the file, and the space of the disk"
        ) from error
