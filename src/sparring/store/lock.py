"""Lock of a run folder: one writer."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from sparring.errors import refusal


class RunLock:
    """Lock on a file until `close` or the death of this process, however it dies.

    The kernel owns the lock, so the file of a killed run locks nothing. The file contains the holder's pid and host,
    for the error of the next process.

    Args:
        reads: True for a reader of a store without shared memory, which does not write its pid and host into the file.

    Raises:
        BadInput: another process, or another store in this one, holds the lock, or the file system has no locks.
    """

    def __init__(self, path: Path, *, reads: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.read(self._file, 512).decode(errors="replace").split())
            os.close(self._file)
            if reads:
                expected = "a run that has ended, because live readers need shared memory, which its file system lacks"
                raise refusal(str(path.parent), expected, holder, "wait for it, or stop it") from None
            advice = "wait for it, stop it, or give this run another run.name"
            raise refusal(str(path.parent), "no other run in this folder", holder, advice) from None
        except OSError as error:
            os.close(self._file)
            advice = "mount it with locks (Lustre: flock), or choose another run.directory"
            raise refusal(str(path.parent), "a file system with locks", str(error), advice) from error
        if not reads:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _holder(words: list[str]) -> str:
    """Describe the process that holds a lock by the words of the lock file: its pid, and its host if not ours."""
    if not words:
        return "one that is just starting"
    pid, *hosts = words
    return f"pid {pid} on host {hosts[0]}" if hosts and hosts[0] != socket.gethostname() else f"pid {pid}"
