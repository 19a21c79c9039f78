"""Failures of a box's file API: whose each is, and as what it is raised."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from sparring.errors import SpoiltFile


class SpoiltByFolder(SpoiltFile, IsADirectoryError):
    """A folder stands in the file's place."""


class SpoiltByMode(SpoiltFile, PermissionError):
    """The file, or a folder on the way, is closed."""


SPOILT: Mapping[int, type[SpoiltFile]] = {
    errno.EISDIR: SpoiltByFolder,
    errno.EACCES: SpoiltByMode,
    errno.EPERM: SpoiltByMode,
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ENXIO, errno.ELOOP, errno.ENOSPC), SpoiltFile),
}
"""Errors that an earlier command of the policy can have caused. ENXIO: a pipe, a socket or a device; EEXIST: a file
stands at the path of a new folder. A missing file or a read-only path does not count."""


def raise_for(header: Mapping[str, Any], path: str, used: bool, most_bytes: int | None = None) -> None:
    """Raise what a command on files has answered with.

    Args:
        header: of the answer.
        path: of the file.
        used: whether a command of the policy has run in the box.
        most_bytes: that a file to be read may have.

    Raises:
        SpoiltFile: a command of the policy can be the reason.
        OSError: none can.
        TimeoutError: it took too long.
    """
    if header["timed_out"]:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
    if most_bytes is not None and header["exit"] == errno.EFBIG:
        raise (SpoiltFile if used else OSError)(errno.EFBIG, f"more than {most_bytes} bytes, which is most_bytes", path)
    if number := header["exit"]:
        raise (SPOILT.get(number, OSError) if used else OSError)(number, os.strerror(number), path)
