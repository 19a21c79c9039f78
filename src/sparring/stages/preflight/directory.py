"""Check of the folder of runs, before anything heavy is imported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sparring.errors import refusal
from sparring.store.file_system import LOCKS_HERE, MOUNTS, file_system_of


def check_directory(directory: Path, mounts: Path = MOUNTS) -> list[str]:
    """Refuse a `directory` in which no folder can be made (a trial folder is made and removed), or in which two
    machines could write one run. Return sentences about a file system that several machines share; `mounts` is as in
    `file_system_of`."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".sparring-", dir=there))  # /proc denies root what its mode allows
    except OSError as error:
        actual = f"one that takes no folder ({error.strerror})" if there.is_dir() else "a file"
        raise refusal("run.directory", f"a folder at {there}", actual, "choose another") from error
    found = file_system_of(directory, mounts)
    if found.locks_here_alone:
        fix = "mount it without them (Lustre: with flock), or choose another"
        actual = f"{found.kind} with {', '.join(sorted(found.options & LOCKS_HERE))}"
        raise refusal("run.directory", "a file system whose locks other machines see", actual, fix)
    if not found.remote:
        return []
    limit = (
        "one process alone opens a run's record there: sparring report, diff and replay work after the run has ended"
    )
    return [f"run.directory: {directory} is on {found.kind}, which several machines may share; {limit}"]
