"""Lock of a run folder: one writer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sparring.errors import refusal


class RunLock:
    """Lock on a file until `close` or the death of this process, however it dies.

    The kernel owns the lock, so the file of a killed run locks nothing. The file contains the holder's pid, for the
    error of the next process.

    Raises:
        BadInput: another process, or another store in this one, holds the lock.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._file, 32).decode().strip()
            os.close(self._file)
            raise refusal(
                str(path.parent),
                "no other run in this folder",
                f"pid {pid}" if pid else "one that is just starting",
                "wait for it, stop it, or give this run another run.name",
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
