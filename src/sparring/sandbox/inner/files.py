"""File operations in a box, run as commands of the box itself, without code of the policy.

Each returns 0, or the errno that the parent raises. None of them waits: anything but a regular file (a pipe, a socket,
a device, a folder) is refused at once. Standard library only, for Python >= 3.9.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from io import FileIO
from typing import Any

PIECE_BYTES = 1 << 18
TOLD = (
    errno.ENOENT,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENXIO,
    errno.ENOSPC,
    errno.EFBIG,
)
"""Errors that are reported unchanged even if a link led to the path."""

KINDS = ((stat.S_ISREG, b"file"), (stat.S_ISDIR, b"folder"), (stat.S_ISLNK, b"link"))


def run_on_files(request: dict[str, Any]) -> int:
    """Read, write, remove or list, according to `op` of the request."""
    try:
        if request["op"] == "read":
            with open(_readable(request["path"], request.get("plain", False)), "rb", buffering=0) as file:
                _read(file, request["offset"], request["output"], request["most"])
        elif request["op"] == "write":
            _write(request["path"], request["size"])
        elif request["op"] == "remove":
            os.unlink(request["path"])
        else:
            _list(request["path"])
    except OSError as error:
        number = error.errno or errno.EIO
        path = request["path"]
        if number not in TOLD and not request.get("plain") and os.path.realpath(path) != os.path.abspath(path):
            return errno.ELOOP  # a link led to a path with this error
        return number
    return 0


def _plain(path: str, flags: int, within: int | None = None) -> int:
    """Open a regular file without waiting."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=within)
    kind = os.fstat(file).st_mode
    if not stat.S_ISREG(kind):
        os.close(file)
        raise _error_of(errno.EISDIR if stat.S_ISDIR(kind) else errno.ENXIO)
    return file


def _error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _readable(path: str, plain: bool) -> int:
    """Open a regular file to read it; `plain`: refuse links, also in the folders on its way."""
    if not plain:
        return _plain(path, os.O_RDONLY)
    *folders, name = [part for part in path.split("/") if part]
    within = os.open("/" if path.startswith("/") else ".", os.O_PATH)
    for folder in folders:
        within, outer = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within), within
        os.close(outer)
    return _plain(name, os.O_RDONLY | os.O_NOFOLLOW, within)


def _read(file: FileIO, offset: int, count: int, most: int) -> None:
    """Copy at most `count` bytes from `offset` to stdout. A file of more than `most` bytes is refused unread."""
    if os.fstat(file.fileno()).st_size > most:
        raise _error_of(errno.EFBIG)
    file.seek(offset)
    while count:
        piece = file.read(min(count, PIECE_BYTES))
        if not piece:
            return
        sys.stdout.buffer.write(piece)
        count -= len(piece)


def _write(path: str, size: int) -> None:
    """Copy `size` bytes of stdin to a file, creating its folders. Until it is complete the file has no name, so a
    failed or killed write leaves the old content and no trace."""
    path = os.path.realpath(path) if os.path.islink(path) else path
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    within, mode = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), None
    try:
        earlier = _plain(path, os.O_WRONLY)
    except FileNotFoundError:
        pass
    else:
        mode = stat.S_IMODE(os.fstat(earlier).st_mode)
        os.close(earlier)
    with open(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb", buffering=0) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        for piece in iter(lambda: sys.stdin.buffer.read(PIECE_BYTES), b""):
            while piece:  # a signal may interrupt a write
                count = file.write(piece)
                piece, size = piece[count:], size - count
        if size:
            raise _error_of(errno.EIO)
        name = f".{os.urandom(12).hex()}"
        os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=within)  # the argument makes Python follow the link
        try:
            os.replace(name, os.path.basename(path), src_dir_fd=within, dst_dir_fd=within)
        except OSError:
            os.unlink(name, dir_fd=within)
            raise


def _list(path: str) -> None:
    """Write a folder's entries to stdout: for each its kind, its name and a NUL."""
    with os.scandir(os.fsencode(path)) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            kind = next((word for is_kind, word in KINDS if is_kind(mode)), b"other")
            sys.stdout.buffer.write(kind + b" " + entry.name + b"\0")
