"""Linux calls about mounts, through the C library. Constants are from linux/mount.h, linux/fcntl.h and asm/unistd.h."""

from __future__ import annotations

import ctypes
import os
import struct

MS_RDONLY, MS_NOSUID, MS_NOSUID_NODEV, MS_NOEXEC = 0x1, 0x2, 0x2 | 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_REC_PRIVATE = 0x20, 0x1000, 0x4000, 0x4000 | 0x40000
MNT_DETACH = 2
OPEN_TREE, MOVE_MOUNT, OPENAT2 = 428, 429, 437  # the same numbers on every architecture
AT_FDCWD, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = -100, 0x1, 0x4, 0x40
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x2, 0x10

# PyDLL keeps the interpreter's lock: no other Python code may run between a fork and its bookkeeping.
libc = ctypes.PyDLL(None, use_errno=True)


def check_result(result: int, what: str) -> int:
    """Return the result of a call.

    Raises:
        OSError: the result is negative.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or change mounts: mount(2)."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else os.fsencode(options)
    check_result(libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount with all below it; it ends when nothing uses it."""
    check_result(libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def cloned_tree(path: str) -> int:
    """Clone the mount of a folder, and return a descriptor of the clone, which is attached nowhere: open_tree(2). The
    clone ends with its last descriptor."""
    flags = ctypes.c_uint(OPEN_TREE_CLONE | os.O_CLOEXEC)
    return check_result(libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}")


def attach_tree(tree: int, target: str) -> None:
    """Attach a mount that is attached nowhere: move_mount(2)."""
    flags = ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH)
    check_result(libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), flags), f"move_mount {target}")


def attach_tree_at(tree: int, target: int) -> None:
    """Attach a mount that is attached nowhere, at an open file or folder: move_mount(2)."""
    flags = ctypes.c_uint(MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH)
    check_result(libc.syscall(MOVE_MOUNT, tree, b"", target, b"", flags), "move_mount")


def open_in(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below the folder `root`. Links on the way are resolved as if `root` were `/`; magic links of /proc
    are refused (ELOOP): openat2(2).

    Raises:
        OSError: the path cannot be opened.
    """
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    return check_result(libc.syscall(OPENAT2, root, os.fsencode(path), how, ctypes.c_size_t(len(how))), path)
