"""The file of a store, as any program opens it."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sparring.store.sqlite import SqliteStore
from sparring.types import Group


def sql(file: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement on the file `store.sqlite` of a folder, or on a file of another name; returns its rows."""
    path = file / "store.sqlite" if file.is_dir() else file
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement, values).fetchall()


def groups_of(folder: Path) -> list[Group]:
    """Return the groups of a run's RL stage."""
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        return list(store.groups(stage="rl"))
