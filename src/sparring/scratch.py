"""Folders whose files one process needs for a while. Those of a killed process are removed by the next process."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch(inside: Path | None = None, name: str = "scratch") -> Iterator[Path]:
    """Make a folder `.NAME-*` in `inside` (None: the temporary folder, for commands without a run), locked while this
    process lives, and remove it at the end. Folders of killed processes are removed first."""
    inside = inside or Path(tempfile.gettempdir())
    for folder in inside.iterdir():
        if re.fullmatch(re.escape(f".{name}-") + r"[a-z0-9_]{8}", folder.name):
            with suppress(OSError):  # its process lives, it is another user's, or it was removed meanwhile
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=inside))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # else another process removed it before it was locked
            break
        os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
