"""The file of a store, as any program opens it."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def sql(file: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement on the file `store.sqlite` of a folder, or on a file of another name; returns its rows."""
    path = file / "store.sqlite" if file.is_dir() else file
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement, values).fetchall()
