"""Atomic writes of a run's files, for readers that may open them at any time."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file under a temporary name next to it, then rename it. A file or link with the temporary name is removed
    first and never followed.

    Args:
        mode: permissions, before the process's umask.
    """
    draft = path.with_name(path.name + ".part")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # which names the disk
    draft.replace(path)
