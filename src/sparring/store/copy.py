"""Copy of a store, for work that must not touch the original run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sparring.store.advice import store_error
from sparring.store.connection import connect, needs_exclusive


def copy_store(source: Path, target: Path) -> None:
    """Copy a store at its last commit; a run may be writing it.

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
        raise store_error(target, f"copy the store {source}", error) from error
