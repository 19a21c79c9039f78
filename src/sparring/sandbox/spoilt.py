"""Errors of a box's file operations, by who caused them."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from sparring.errors import PolicyFailure, SpoiltFile


class SpoiltByFolder(SpoiltFile, IsADirectoryError):
    """A command left a folder at the file's path."""


class SpoiltByMode(SpoiltFile, PermissionError):
    """A command left the file, or a folder of its path, without permission."""


class PortTaken(PolicyFailure, OSError):
    """A command of the box listens at a port that its caller needs."""


SPOILT: Mapping[int, type[SpoiltFile]] = {
    errno.EISDIR: SpoiltByFolder,
    errno.EACCES: SpoiltByMode,
    errno.EPERM: SpoiltByMode,
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.ENXIO, errno.ELOOP, errno.ENOSPC, errno.ENAMETOOLONG), SpoiltFile
    ),
}
"""Errors that an earlier command of the policy can have caused. ENXIO: a pipe, a socket or a device; EEXIST: a file at
the path of a new folder; ENAMETOOLONG: a tree of folders too deep to name what is in it. A missing file or a read-only
path does not count."""


def raise_for(header: Mapping[str, Any], path: str, used: bool, most_bytes: int | None = None) -> None:
    """Raise the error in the answer to a file operation, if there is one.

    Args:
        header: header of the answer.
        path: path of the file.
        used: whether a command of the policy has run in the box.
        most_bytes: maximum size of a file to be read.

    Raises:
        SpoiltFile: a command of the policy may be the reason.
        OSError: no command can be the reason.
        TimeoutError: the operation took too long.
    """
    if header["end"] == "timed out":
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
    if most_bytes is not None and header["exit"] == errno.EFBIG:
        raise (SpoiltFile if used else OSError)(errno.EFBIG, f"more than {most_bytes} bytes, which is most_bytes", path)
    if number := header["exit"]:
        raise (SPOILT.get(number, OSError) if used else OSError)(number, os.strerror(number), path)
