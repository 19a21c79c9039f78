"""Copy of a store, for work that must not touch the original run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sparring.errors import StoreError


def copy_store(source: Path, target: Path) -> None:
    """Copy a store at its last commit; a run may be writing it.

    Args:
        source: file of a store.
        target: new file.

    Raises:
        StoreError: the store cannot be read, or the disk is full.
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
