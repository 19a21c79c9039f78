"""Errors of a box's file operations, by who caused them."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from sparring.errors import PolicyFailure, SpoiltFile


class SpoiltByFolder(SpoiltFile, IsADirectoryError):
    """A command left a folder at the file's path."""


class SpoiltByMode(SpoiltFile, PermissionError):
    """A command left the file, or a folder of its path, without permission."""


class SpoiltByDelay(SpoiltFile, TimeoutError):
    """A command held the operation up, or left more than can be listed in time."""


class PortTaken(PolicyFailure, OSError):
    """A command of the box listens at a port that its caller needs."""


class Exhausted(PolicyFailure, OSError):
    """Commands of the box hold all that one more of them needs: terminals, processes."""


SPOILT: Mapping[int, type[SpoiltFile]] = {
    errno.EISDIR: SpoiltByFolder,
    errno.EACCES: SpoiltByMode,
    errno.EPERM: SpoiltByMode,
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ENXIO, errno.ELOOP, errno.ENOSPC, errno.EINVAL), SpoiltFile),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ETXTBSY, errno.EAGAIN, errno.ESTALE, errno.EINTR), SpoiltFile),
    errno.ENOMEM: SpoiltFile,
}
"""Errors that a command of the policy can have caused. ENXIO: a pipe, a socket or a device; EEXIST: a file at the path
of a new folder; EINVAL: a name with a NUL; ETXTBSY: a program that runs; EAGAIN: a lease (fcntl(2)); ESTALE: a folder
that went away meanwhile; EINTR: the operation was killed; ENOMEM: more names than fit its memory. A missing file or a
read-only path does not count."""


def raise_for_program(number: int, place: str, port: int, is_policys: bool) -> NoReturn:
    """Raise the error for an agent program that could not begin.

    Args:
        number: the reason, an errno.
        place: path at which its files could not be shown; "" if that was not the reason.
        port: its port.
        is_policys: whether a command of the policy may be the reason.

    Raises:
        SpoiltFile: a command left something at the place, or changes it.
        OSError: no command did.
        PortTaken: a command has the port.
        Exhausted: commands hold all that one more of them needs.
    """
    if place:
        raise (SPOILT.get(number, SpoiltFile) if is_policys else OSError)(number, os.strerror(number), place)
    if number == errno.EADDRINUSE:
        raise PortTaken(number, f"port {port} of the box: {os.strerror(number)}")
    raise Exhausted(number, f"one more command of the box: {os.strerror(number)}")


def raise_for(
    header: Mapping[str, Any], path: str, used: bool, most_bytes: int | None = None, *, held_up: bool = False
) -> None:
    """Raise the error in the answer to a file operation, if there is one.

    Args:
        header: header of the answer.
        path: path of the file.
        used: whether a command of the policy has run in the box.
        most_bytes: maximum size of a file to be read.
        held_up: whether a command may be why it took too long: one that ran beside it, or left much to list.

    Raises:
        SpoiltFile: a command of the policy may be the reason.
        OSError: no command can be the reason.
        TimeoutError: the operation took too long, and no command can be the reason.
    """
    if header["end"] == "timed out":
        kind = SpoiltByDelay if used and held_up else TimeoutError
        raise kind(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
    if header["end"] in ("signalled", "killed", "out of memory"):  # by a command beside it, if one has run
        header = {**header, "exit": errno.EINTR}
    if most_bytes is not None and header["exit"] == errno.EFBIG:
        raise (SpoiltFile if used else OSError)(errno.EFBIG, f"more than {most_bytes} bytes, which is most_bytes", path)
    if number := header["exit"]:
        raise (SPOILT.get(number, OSError) if used else OSError)(number, os.strerror(number), path)
