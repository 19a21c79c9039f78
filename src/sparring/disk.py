"""What keeps a file from being opened or written: a read-only disk, a full one, a limit of this process."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
CLOSED = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
NO_FILES = frozenset((errno.EMFILE, errno.ENFILE))
LEAST_BYTES = 1 << 16
"""Free bytes of a disk below which an error of SQLite's means that it is full."""


def shortage(error: BaseException, path: Path | None = None) -> tuple[str, str] | None:
    """Return what the disk or this process lacks, and the way out, as the last two parts of `errors.refusal`; None if
    neither caused the error.

    Args:
        error: error with its causes.
        path: path that was opened or written. None: the path in the error or in one of its causes, if any.
    """
    numbers, names = set[int](), set[str]()
    cause: BaseException | None = error
    while cause is not None:
        said = str(cause).partition("(os error ")[2].partition(")")[0]  # as libraries in Rust write it
        numbers |= {int(said)} if said.isdecimal() else {getattr(cause, "errno", None) or 0}
        names.add(getattr(cause, "sqlite_errorname", ""))
        named = getattr(cause, "filename", None)
        path = Path(named) if path is None and isinstance(named, str) else path
        cause = cause.__cause__ or cause.__context__
    closed = numbers & CLOSED or any(name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")) for name in names)
    broken = any(name.startswith("SQLITE_IOERR") and name != "SQLITE_IOERR_READ" for name in names)
    if numbers & NO_FILES or closed and not _opens():
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"none free of the {most} files that a process may open", "raise the limit (ulimit -n)"
    folder = path and next(each for each in (path.absolute(), *path.absolute().parents) if os.path.isdir(each))
    disk = os.statvfs(folder) if folder else None
    free = disk.f_bavail * disk.f_frsize if disk else LEAST_BYTES
    if numbers & FULL or "SQLITE_FULL" in names or broken and free < LEAST_BYTES:
        return f"{megabytes(free)} free" if disk else "none", "free disk space"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if errno.EFBIG in numbers or broken and most != resource.RLIM_INFINITY:
        return f"a limit of {megabytes(most)} for each file", "raise the limit (ulimit -f)"
    if closed and disk and disk.f_flag & os.ST_RDONLY:
        return "a read-only disk", "make it writable, or copy the folder to one that is"
    return None


def megabytes(number: float) -> str:
    """Write a number of bytes in MB, small ones with two digits."""
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 or not number else f"{number / 1e6:.2g} MB"


def _opens() -> bool:
    """Return whether this process has a free file descriptor."""
    try:
        os.close(os.open("/", os.O_PATH))
    except OSError as error:
        return error.errno not in NO_FILES
    return True
