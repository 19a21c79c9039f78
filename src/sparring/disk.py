"""What keeps a file from being opened or written: a read-only disk, a full one, a limit of this process."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

CLOSED = frozenset((errno.EROFS, errno.EACCES, errno.EPERM))
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
NO_FILES = frozenset((errno.EMFILE, errno.ENFILE))
LEAST_BYTES = 1 << 16
"""Free bytes below which a disk is full, whatever a library says of its error: a page of SQLite's log and its index."""


def shortage(error: BaseException, path: Path | None = None) -> tuple[str, str] | None:
    """Return what the disk or this process lacks, and the way out, as the last two parts of `errors.refusal`; None if
    neither caused the error.

    Args:
        error: error with its causes.
        path: path that was opened or written; None: the one that the error or a cause names, if any.
    """
    numbers = set(_numbers(error))
    names = [getattr(each, "sqlite_errorname", "") for each in _causes(error)]
    named = [each.filename for each in _causes(error) if isinstance(each, OSError) and isinstance(each.filename, str)]
    path = Path(named[0]) if path is None and named else path
    folder = path and next(each for each in (path.absolute(), *path.absolute().parents) if os.path.isdir(each))
    closed = bool(numbers & CLOSED) or any(name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")) for name in names)
    if numbers & NO_FILES or closed and not _opens():
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"none free of the {most} files that a process may open", "raise the limit (ulimit -n)"
    free = _free_bytes(folder)
    unwritten = any(name.startswith("SQLITE_IOERR") and name != "SQLITE_IOERR_READ" for name in names)
    if numbers & FULL or "SQLITE_FULL" in names or unwritten and free is not None and free < LEAST_BYTES:
        return "none" if free is None else f"{megabytes(free)} free", "free disk space"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if errno.EFBIG in numbers or unwritten and most != resource.RLIM_INFINITY:
        return f"a limit of {megabytes(most)} for each file", "raise the limit (ulimit -f)"
    if closed and folder and os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "a read-only disk", "make it writable, or copy the folder to one that is"
    if closed and folder and not os.access(folder, os.W_OK | os.X_OK):
        return "a folder that this user may not write", "make it writable, or copy it to one that is"
    return None


def megabytes(number: float) -> str:
    """Write a number of bytes in MB, small ones with two digits."""
    return f"{number / 1e6:,.1f} MB" if number >= 1e5 or not number else f"{number / 1e6:.2g} MB"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _numbers(error: BaseException) -> Iterator[int]:
    """Yield the system's numbers of an error and its causes, those that a library in Rust writes in its text too."""
    for each in _causes(error):
        number, said = getattr(each, "errno", None), str(each).partition("(os error ")[2].partition(")")[0]
        yield from (number,) if isinstance(number, int) else ()
        yield from (int(said),) if said.isdecimal() else ()


def _free_bytes(folder: Path | None) -> int | None:
    if folder is None:
        return None
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _opens() -> bool:
    """Return whether this process has a free file descriptor."""
    try:
        os.close(os.open("/", os.O_PATH))
    except OSError as error:
        return error.errno not in NO_FILES
    return True
