"""Files of a box: the layers that hold what it writes, the layers below them, and its root.

One tmpfs, `disk_bytes` large, holds the layers of the box (`l/0`, `l/1`, ...). The last one is written to; the others
are frozen. No command finds it: an empty folder lies over it, and the box's pid 1 reaches it by a descriptor. A layer
has a folder for each part of the box's files:

    own     /box, /tmp, /dev/shm and, in boxes that run programs, /agent
    root    the rest of the root; in boxes of the image "python" bubblewrap's read-only root takes its place
    usr     in boxes of the image "host" a part of its own, as is each other folder of the host's programs

A part is a plain folder while nothing lies below its layer, and an overlay otherwise: over the frozen layers, and over
the image's files below those. A snapshot freezes the last layer and begins the next one. A fork of a snapshot is a box
whose first layers are the frozen ones of another box.

Layers pass between boxes as mounts that are attached nowhere, each in one descriptor. Attaching a layer uses its
descriptor up, so a box gives a new one back. A layer ends with its last descriptor: no file and no mount is left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterable
from typing import Any

from sparring.sandbox.inner.calls import (
    MS_BIND,
    MS_NOEXEC,
    MS_NOSUID,
    MS_NOSUID_NODEV,
    MS_REC,
    MS_REMOUNT,
    attach_tree,
    attach_tree_at,
    cloned_tree,
    mount,
    open_in,
    unmount,
)

OWN = {"agent": "/agent", "box": "/box", "tmp": "/tmp", "shm": "/dev/shm"}
"""Folders of a box that it can always write to, by name in the part `own`."""
ROOT = "root"
"""Root of commands in the tmpfs. The box's pid 1 itself stays in bubblewrap's root, so that it never loads code from an
image."""
PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
LAYER_INODES = 64
"""Inodes that a layer needs for itself. They are reserved for each layer, so that commands cannot use them up."""
PLACE = 210
"""Lowest number for the descriptor of the box's tmpfs. Until commands enter the root, theirs are lower."""
MOST_NAMES = 1 << 20
"""Maximum size of a file such as /etc/passwd to which a box adds a line, in bytes."""
SYSTEM = "cpuinfo filesystems loadavg meminfo stat swaps uptime version vmstat".split()
"""Files of /proc about the whole machine that ps, free, top and their like read."""
REPLACED = ("dev", "proc", "box", "tmp", "agent", "mnt")


class BoxFiles:
    """Files of one box.

    Args:
        limits: limits and root of the box: `disk`, its `user`, `image` ("python", "host" or "layers") and `layers`, the
            unpacked layers of an image, lowest first.
        frozen: descriptors of frozen layers of another box, lowest first. The descriptors are used up.

    Attributes:
        returned: new descriptors of these layers.
        is_rooted: whether commands have a root of their own.
    """

    def __init__(self, limits: dict[str, Any], frozen: list[int]) -> None:
        disk_bytes, image = limits["disk"], limits["image"]
        self._size, self._inodes = disk_bytes, max(256, disk_bytes >> 12) + len(frozen) + LAYER_INODES
        mount("box", "/mnt", "tmpfs", MS_NOSUID_NODEV, f"size={disk_bytes},nr_inodes={self._inodes},mode=0700")
        self.is_rooted = image != "python"
        self._user: int = limits["user"]
        self._parts: dict[str, list[str]] = {"own": []}  # what lies below the first layer of each, highest first
        self._own = {name: path for name, path in OWN.items() if os.path.isdir(path)}
        place = os.open("/mnt", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._place = fcntl.fcntl(place, fcntl.F_DUPFD_CLOEXEC, PLACE)
        os.close(place)
        mount("/box", "/mnt", None, MS_BIND)
        os.fchdir(self._place)
        for name in ("l", "w", "own", ROOT):
            os.mkdir(name, 0o755)
        if image == "host":
            self._parts["root"] = []
            self._parts |= {name: [f"/{name}"] for name in PROGRAMS if _is_folder(f"/{name}")}
        elif self.is_rooted:
            os.mkdir("i")
            for number, layer in enumerate(limits["layers"]):  # short names: the options of a mount fit one page
                os.symlink(layer, f"i/{number}")
            self._parts["root"] = [f"i/{number}" for number in reversed(range(len(limits["layers"])))]
        self._is_host = image == "host"
        self._first = self._last = len(frozen)
        self.returned = []
        for number, tree in enumerate(frozen):
            os.mkdir(f"l/{number}")
            attach_tree(tree, f"l/{number}")
            os.close(tree)
            self.returned.append(cloned_tree(f"l/{number}"))
        self._begin_layer()

    def snapshot(self) -> int:
        """Freeze the files and return a descriptor of the layer that was written to until now. No process of the box
        may use its files."""
        os.fchdir(self._place)
        if self.is_rooted:
            unmount(ROOT)
        for path in self._own.values():
            unmount(path)
        unmount("own")
        tree = cloned_tree(f"l/{self._last}")
        self._last += 1
        self._inodes += LAYER_INODES
        mount(None, ".", None, MS_REMOUNT | MS_NOSUID_NODEV, f"size={self._size},nr_inodes={self._inodes}")
        self._begin_layer()
        return tree

    @property
    def has_frozen(self) -> bool:
        """Whether a snapshot of the box was made. A snapshot keeps the whole tmpfs in memory."""
        return self._last > self._first

    def drop_last(self) -> None:
        """Remove the files of the last layer. No process of the box may run any more."""
        os.fchdir(self._place)
        for name in ("l", "w"):
            _empty(f"{name}/{self._last}")

    def enter(self, folder: str) -> None:
        """Enter the root and the working folder of commands, irrevocably for a process without capabilities. The folder
        is /box where a command has removed the given one, or has put something else in its place."""
        self._enter_root()
        os.close(self._place)  # the folder may be a link of a command's to /proc/self/fd
        try:
            os.chdir(folder)
        except OSError:
            os.chdir("/box")

    def first_program(self, paths: Iterable[str]) -> str | None:
        """Return the first of these paths that is a program in the root of commands."""
        own = os.open("/", os.O_PATH)
        self._enter_root()
        try:
            return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)
        finally:
            os.fchdir(own)
            os.chroot(".")
            os.close(own)
            os.chdir("/box")

    def show(self, paths: list[str]) -> None:
        """Show files and folders of bubblewrap's root at the same paths of the root of commands, read-only, until the
        next snapshot. Links on the way to a path are followed within the root of commands.

        Raises:
            OSError: the image, or a command, has something else at a path, which the error names, or on the way to it,
                or the disk is full.
        """
        root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._place) if paths else -1
        for path in paths:
            try:
                _show_in(root, path)
            except OSError as error:
                os.close(root)
                raise OSError(error.errno, os.strerror(error.errno or errno.EIO), path) from error
        if paths:
            os.close(root)

    def _enter_root(self) -> None:
        if self.is_rooted:
            os.fchdir(self._place)
            os.chroot(ROOT)
            os.chdir("/")

    def _begin_layer(self) -> None:
        """Mount every part with a new layer on top."""
        os.mkdir(f"l/{self._last}", 0o755)
        os.mkdir(f"w/{self._last}", 0o700)
        self._mount_part("own", "own")
        for name, path in self._own.items():
            if not self._last:
                os.mkdir(f"own/{name}", 0o700)
            mount(f"own/{name}", path, None, MS_BIND)
        if self.is_rooted:
            self._build_root()
        os.chdir("/box")

    def _mount_part(self, part: str, target: str) -> None:
        upper, work = f"l/{self._last}/{part}", f"w/{self._last}/{part}"
        os.mkdir(upper, 0o755)
        lower = [f"l/{number}/{part}" for number in reversed(range(self._last))] + self._parts[part]
        if not lower:
            mount(upper, target, None, MS_BIND)
            return
        os.mkdir(work, 0o700)
        options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work},userxattr"
        mount("overlay", target, "overlay", MS_NOSUID, options)

    def _build_root(self) -> None:
        """Mount the root at `ROOT`, with the box's own folders, devices and processes in it."""
        self._mount_part("root", ROOT)
        if self._is_host:
            self._copy_host_root()
        elif not self._last:
            _give_names(self._user)
        for name in ("dev", *(name for name in self._own if name != "shm")):
            _make_folder(f"{ROOT}/{name}")
            mount(f"/{name}", f"{ROOT}/{name}", None, MS_BIND | MS_REC)
        _make_folder(f"{ROOT}/proc")
        _mount_proc(f"{ROOT}/proc")

    def _copy_host_root(self) -> None:
        """Fill the root as bubblewrap's: its links and small files, its folders of programs as parts, and its other
        folders read-only."""
        for name in os.listdir("/"):
            source, target = f"/{name}", f"{ROOT}/{name}"
            if os.path.islink(source):
                if not self._last:
                    os.symlink(os.readlink(source), target)
            elif name in self._parts:
                _make_folder(target)
                self._mount_part(name, target)
            elif name == "etc":
                self._copy_settings()
            elif name not in REPLACED:
                _make_folder(target)
                mount(source, target, None, MS_BIND | MS_REC)

    def _copy_settings(self) -> None:
        _make_folder(f"{ROOT}/etc")
        for name in os.listdir("/etc"):
            source, target = f"/etc/{name}", f"{ROOT}/etc/{name}"
            if _is_folder(source):
                _make_folder(target)
                mount(source, target, None, MS_BIND | MS_REC)
            elif not self._last:
                with open(source, "rb") as read, open(target, "wb") as written:
                    written.write(read.read())


def _mount_proc(target: str) -> None:
    """Mount a whole /proc, and cover all but the box's processes and the files of `SYSTEM`."""
    mount("proc", target, "proc", MS_NOSUID_NODEV | MS_NOEXEC)
    for entry in os.scandir(target):
        if not entry.name.isdigit() and entry.name not in SYSTEM and not entry.is_symlink():
            mount("/mnt" if entry.is_dir() else "/dev/null", entry.path, None, MS_BIND)  # /mnt is empty


def _give_names(user: int) -> None:
    """Add the box's host name and user to an image's /etc/hosts, /etc/passwd and /etc/group, unless they are there. A
    file that cannot be read or written stays as it is."""
    line = f"{'agent' if user else 'root'}:x:{user}:"
    root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _add_line(root, "/etc/hosts", "127.0.0.1 localhost box\n", re.compile(rb"^[^#\n]*\sbox(?:\s|$)", re.MULTILINE))
        is_there = re.compile(rb"^[^:\n]+:[^:\n]*:%d:" % user, re.MULTILINE)
        _add_line(root, "/etc/passwd", f"{line}{user}:{line.partition(':')[0]}:/box:/bin/sh\n", is_there)
        _add_line(root, "/etc/group", f"{line}\n", is_there)
    finally:
        os.close(root)


def _add_line(root: int, path: str, line: str, is_there: re.Pattern[bytes]) -> None:
    """Add a line to a file below a root, unless the file has a line that matches. Only then is a file of a frozen layer
    opened for writing, which copies it."""
    try:
        os.close(_open_file(root, path))
        with open(open_in(root, path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as there:
            kind = os.fstat(there.fileno())
            text = there.read(MOST_NAMES) or b"" if stat.S_ISREG(kind.st_mode) else b""
            if not stat.S_ISREG(kind.st_mode) or kind.st_size > MOST_NAMES or is_there.search(text):
                return
        with open(open_in(root, path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "ab", buffering=0) as file:
            file.write(b"\n" * (text != b"" and not text.endswith(b"\n")) + line.encode())
    except OSError:
        pass


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _show_in(root: int, path: str) -> None:
    """Attach a clone of the mount at a path, at the same path below a root, unless the mount is there already. A
    command may have moved an earlier clone."""
    if os.path.islink(path):
        _link_in(root, path)
        return
    target = (_open_folder if os.path.isdir(path) else _open_file)(root, path)
    try:
        if os.path.samestat(os.fstat(target), os.stat(path)):
            return
        tree = cloned_tree(path)
        try:
            attach_tree_at(tree, target)
        finally:
            os.close(tree)
    finally:
        os.close(target)


def _link_in(root: int, path: str) -> None:
    folder, name = os.path.split(path)
    place, target = _open_folder(root, folder), os.readlink(path)
    try:
        os.symlink(target, name, dir_fd=place)
    except FileExistsError:
        if not _is_link_to(target, name, place):
            raise
    finally:
        os.close(place)


def _is_link_to(target: str, name: str, folder: int) -> bool:
    try:
        return os.readlink(name, dir_fd=folder) == target
    except OSError:  # something else
        return False


def _open_file(root: int, path: str) -> int:
    """Open a path below a root that is no folder, without waiting. Create the file and its folders if missing."""
    try:
        file = open_in(root, path, os.O_PATH)
    except FileNotFoundError:
        os.close(_open_folder(root, os.path.dirname(path)))
        os.close(open_in(root, path, os.O_CREAT | os.O_WRONLY | os.O_NONBLOCK, 0o644))
        file = open_in(root, path, os.O_PATH)
    if stat.S_ISDIR(os.fstat(file).st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return file


def _open_folder(root: int, path: str) -> int:
    """Open a folder below a root. Create it, and the folders above it, if they are missing."""
    try:
        return open_in(root, path, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        above, name = os.path.split(path)
    place = _open_folder(root, above)
    try:
        os.mkdir(name, 0o755, dir_fd=place)
    except FileExistsError:  # a link to nothing
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    finally:
        os.close(place)
    return open_in(root, path, os.O_PATH | os.O_DIRECTORY)


def _empty(path: str) -> None:
    """Remove what a folder contains, however deep, with two folders open at once: deeper entries are moved up first."""
    top, prefix, number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), os.urandom(8).hex(), 0
    while names := os.listdir(top):
        for name in names:
            if _is_unlinked(name, top):
                continue
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            for inner in os.listdir(folder):
                if not _is_unlinked(inner, folder):
                    os.rename(inner, f"{prefix}{number}", src_dir_fd=folder, dst_dir_fd=top)
                    number += 1
            os.close(folder)
            os.rmdir(name, dir_fd=top)
    os.close(top)


def _is_unlinked(name: str, folder: int) -> bool:
    """Remove an entry; return False if it is a folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


def _make_folder(path: str) -> None:
    """Make a folder at a path. Any other entry that an image or a command left there, such as a link, is removed."""
    if os.path.lexists(path) and not _is_folder(path):
        os.unlink(path)
    os.makedirs(path, 0o755, exist_ok=True)
