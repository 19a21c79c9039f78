"""File operations in a box, run as commands of the box itself, without code of the policy.

`run_on_files` returns 0, or the errno that the parent raises. Reading and writing never wait for a file: anything but a
regular file (a pipe, a socket, a device, a folder) is refused at once. Standard library only, for Python >= 3.9.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from contextlib import suppress
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

MOST_DEPTH = 200
"""Maximum nesting of folders in a tree."""
CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL)
"""Errors of an entry that a command has removed, or replaced by another kind, since it was listed. EINVAL: a link's
target was asked for (readlink(2))."""
KINDS = ((stat.S_ISREG, b"file"), (stat.S_ISDIR, b"folder"), (stat.S_ISLNK, b"link"))


def run_on_files(request: dict[str, Any], folder: str) -> int:
    """Read, write, remove, list, pack or unpack, according to `op` of the request, in the working folder."""
    try:
        if request["op"] == "read":
            with open(_readable(request["path"], request.get("plain", False)), "rb", buffering=0) as file:
                _read(file, request["most"])
        elif request["op"] == "write":
            _write(request["path"], request["size"])
        elif request["op"] == "remove":
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(request["path"])
        elif request["op"] == "pack":
            pack(request["path"], request["most"])
        elif request["op"] == "unpack":
            unpack(request["path"])
        else:
            _list(request["path"], request["most"])
    except MemoryError:
        return errno.ENOMEM
    except ValueError:
        return errno.EINVAL  # a name with a NUL, or that is no UTF-8
    except OSError as error:
        number = error.errno or errno.EIO
        if number == errno.ENOENT and request["op"] in ("write", "unpack"):
            number = errno.ESTALE  # a folder went away after it was made
        named = error.filename if request["op"] == "unpack" else request["path"]
        path = os.path.normpath(os.path.join(folder, named or request["path"]))
        if number not in TOLD and not request.get("plain") and os.path.realpath(path) != path:
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
    """Open a regular file to read it. `plain`: refuse links, also among the folders of the path."""
    if not plain:
        return _plain(path, os.O_RDONLY)
    *folders, name = [part for part in path.split("/") if part]
    within = os.open("/" if path.startswith("/") else ".", os.O_PATH)
    for folder in folders:
        within, outer = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within), within
        os.close(outer)
    return _plain(name, os.O_RDONLY | os.O_NOFOLLOW, within)


def _read(file: FileIO, most: int) -> None:
    """Copy a file to stdout. A file of more than `most` bytes is refused, if possible before anything is copied."""
    if os.fstat(file.fileno()).st_size > most:
        raise _error_of(errno.EFBIG)
    room = most
    while piece := file.read(PIECE_BYTES):
        room -= len(piece)
        if room < 0:  # such as a file of /proc, which does not report its size
            raise _error_of(errno.EFBIG)
        sys.stdout.buffer.write(piece)


def _write(path: str, size: int, mode: int | None = None) -> None:
    """Copy `size` bytes of stdin to a file, creating its folders. Until it is complete the file has no name, so a
    failed or killed write leaves the old content and no trace. Its mode is `mode`, or the replaced file's."""
    path = os.path.realpath(path) if os.path.islink(path) else path
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        earlier = _plain(path, os.O_WRONLY)
    except FileNotFoundError:
        pass
    else:
        mode = stat.S_IMODE(os.fstat(earlier).st_mode) if mode is None else mode
        os.close(earlier)
    with open(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb", buffering=0) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        while piece := sys.stdin.buffer.read(min(size, PIECE_BYTES)):
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
    os.close(within)


def _list(path: str, most: int) -> None:
    """Write a folder's entries to stdout: for each its kind, its name and a NUL. Entries that vanish meanwhile are left
    out. More than `most` bytes are refused."""
    with os.scandir(os.fsencode(path)) as entries:
        for entry in entries:
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except FileNotFoundError:
                continue
            kind = next((word for is_kind, word in KINDS if is_kind(mode)), b"other")
            told = kind + b" " + entry.name + b"\0"
            most -= len(told)
            if most < 0:
                raise _error_of(errno.EFBIG)
            sys.stdout.buffer.write(told)


# ---- trees: for each entry a line of JSON (path, kind, size, executable, target of a link), then its bytes ----


def unpack(path: str) -> None:
    """Write a tree from stdin below a folder."""
    os.makedirs(path, exist_ok=True)
    while line := sys.stdin.buffer.readline():
        entry = json.loads(line)
        target = os.path.join(path, entry["path"])
        try:
            _unpack_entry(entry, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, target) from error


def _unpack_entry(entry: dict[str, Any], target: str) -> None:
    if entry["kind"] == "folder":
        os.makedirs(target, exist_ok=True)
    elif entry["kind"] == "file":
        _write(target, entry["size"], 0o755 if entry["executable"] else None)
    else:
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        if os.path.islink(target):
            os.unlink(target)
        os.symlink(entry["target"], target)


def pack(path: str, most: int) -> None:
    """Write the tree below a folder to stdout. Links are not followed, not even new ones. Left out are entries that
    vanish meanwhile, and the contents of foreign folders (`_is_foreign`). More than `most` bytes, names included, are
    refused."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _pack_folder(folder, "", most, MOST_DEPTH)


def _pack_folder(folder: int, inner: str, most: int, depth: int) -> int:
    """Write what an open folder contains, close it, and return how many of `most` bytes are left."""
    for name in sorted(os.listdir(folder)):
        try:
            most = _pack_entry(folder, inner + name, most, depth)
        except OSError as error:
            if error.errno not in CHANGED:
                raise
    os.close(folder)
    return most


def _pack_entry(folder: int, path: str, most: int, depth: int) -> int:
    name = os.path.basename(path)
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    kind = next((word.decode() for is_kind, word in KINDS if is_kind(mode)), "other")
    target = os.readlink(name, dir_fd=folder) if kind == "link" else ""
    opened, size = -1, 0
    if kind == "file":
        opened = _plain(name, os.O_RDONLY | os.O_NOFOLLOW, folder)
        size = os.fstat(opened).st_size
    elif kind == "folder":
        opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    told = {"path": path, "kind": kind, "size": size, "executable": bool(mode & 0o100), "target": target}
    line = json.dumps(told).encode() + b"\n"
    most -= len(line) + size
    if most < 0:
        raise _error_of(errno.EFBIG)
    if not depth:
        raise _error_of(errno.ENAMETOOLONG)
    sys.stdout.buffer.write(line)
    if kind == "file":
        _pack_content(opened, size)
    elif kind == "folder" and _is_foreign(opened, folder):
        os.close(opened)
    elif kind == "folder":
        most = _pack_folder(opened, f"{path}/", most, depth - 1)
    return most


def _pack_content(opened: int, size: int) -> None:
    """Write `size` bytes of an open file, and close it. If a command shortens the file meanwhile, zeros follow."""
    with open(opened, "rb", buffering=0) as file:
        while size and (piece := file.read(min(size, PIECE_BYTES))):
            sys.stdout.buffer.write(piece)
            size -= len(piece)
    while size:
        size -= sys.stdout.buffer.write(bytes(min(size, PIECE_BYTES)))


def _is_foreign(folder: int, outer: int) -> bool:
    """Return whether a folder is not part of the box's files, unlike its parent folder `outer`: /proc, or a read-only
    mount."""
    device = os.fstat(folder).st_dev
    if device == os.fstat(outer).st_dev:
        return False
    return device == os.stat("/proc").st_dev or bool(os.fstatvfs(folder).f_flag & os.ST_RDONLY)
