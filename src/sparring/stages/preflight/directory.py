"""Check of the folder of runs, before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

from sparring.errors import refusal
from sparring.store.file_system import LOCKS_HERE, MOUNTS, file_system_of


def check_directory(directory: Path, mounts: Path = MOUNTS) -> list[str]:
    """Refuse a `directory` in which no folder can be made, or in which two machines could write one run; nothing is
    made yet.

    Args:
        mounts: mounts of this process, as in `file_system_of`.

    Returns:
        Sentences for the user about a file system of several machines.
    """
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = "one without the right to write" if there.is_dir() else "a file"
        got = "a read-only disk" if os.statvfs(there).f_flag & os.ST_RDONLY else got
        raise refusal("run.directory", f"a folder at {there}", got, "choose another")
    found = file_system_of(directory, mounts)
    if found.locks_here_alone:
        do = "mount it without them (Lustre: with flock), or choose another"
        got = f"{found.kind} with {', '.join(sorted(found.options & LOCKS_HERE))}"
        raise refusal("run.directory", "a file system whose locks other machines see", got, do)
    if not found.remote:
        return []
    limit = (
        "one process alone opens a run's record there: sparring report, diff and replay work after the run has ended"
    )
    return [f"run.directory: {directory} is on {found.kind}, which several machines may share; {limit}"]
