"""Check of the folder of runs, before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

from sparring.errors import refusal


def check_directory(directory: Path) -> None:
    """Refuse a `directory` in which no folder can be made; nothing is made yet."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = "one without the right to write" if there.is_dir() else "a file"
        raise refusal("run.directory", f"a folder at {there}", got, "choose another")
