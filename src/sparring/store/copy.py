"""Copy of a store, for work that must not touch the original run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sparring.errors import StoreError
from sparring.store.connection import connect, needs_exclusive


def copy_store(source: Path, target: Path) -> None:
    """Copy a store at its last commit; a run may be writing it.

    Args:
        source: file of a store.
        target: new file.

    Raises:
        BadInput: a run holds it on a file system without shared memory.
        StoreError: the store cannot be read, or the disk is full.
    """
    try:
        with (
            closing(connect(source, read_only=True, exclusive=needs_exclusive(source))) as reader,
            closing(sqlite3.connect(target)) as writer,
        ):
            reader.backup(writer)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(
            f"{source}: expected a store to copy to {target}, got {error}; check the file, and the space of the disk"
        ) from error
