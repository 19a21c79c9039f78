"""One writer per run folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sparring.errors import refusal


class RunLock:
    """Holds a lock file until `close` or the death of this process, however it dies.

    The kernel owns the lock, so a file left behind by a killed run holds nothing. The file names the holder's pid for
    the error of whoever comes second.

    Raises:
        BadInput: another process (or another store in this one) holds it.
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
        """Let the next run in. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
