"""Files of a box: the layers that hold what it writes, the layers below them, and its root.

One tmpfs, `disk_bytes` large, holds the layers of the box (`l/0`, `l/1`, ...). The last one is written to; the others
are frozen. No command finds it: an empty folder lies over it, and the box's pid 1 reaches it by a descriptor. A layer
has a folder for each part of the box's files:

    own     /box, /tmp, /dev/shm and, in boxes that run programs, /agent
    root    the rest of the root; in boxes of the image "python" bubblewrap's read-only root takes its place
    usr     in boxes of the image "host" a part of its own, as is each other folder of the host's programs

A part is a plain folder while nothing lies below its layer, and an overlay otherwise: over the frozen layers, and over
what the image has below those. A snapshot freezes the last layer and begins the next one. A fork of it is a box whose
first layers are the frozen ones of another box.

Layers pass between boxes as mounts that are attached nowhere, each in one descriptor. Attaching uses it up, so whoever
attaches one gives a new one back. What the descriptors hold ends with the last of them: no file and no mount is left.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from typing import Any

from sparring.sandbox.inner.calls import (
    MS_BIND,
    MS_NOSUID,
    MS_NOSUID_NODEV,
    MS_REC,
    MS_REMOUNT,
    attach_tree,
    cloned_tree,
    mount,
    unmount,
)

OWN = {"agent": "/agent", "box": "/box", "tmp": "/tmp", "shm": "/dev/shm"}
"""Folders of a box that it can always write to, by name in the part `own`."""
ROOT = "root"
"""Root of commands in the tmpfs. The box's pid 1 itself stays in bubblewrap's root, so that it never loads code from an
image."""
PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
PLACE = 210
"""Lowest descriptor of the box's files. Commands get theirs below it before they enter the root."""
INODES_OF_LAYER = 64
"""Inodes that a layer may need before a command writes to it."""
REPLACED = ("dev", "proc", "box", "tmp", "agent", "mnt")


class BoxFiles:
    """Files of one box.

    Args:
        limits: limits and root of the box: `disk`, `image` ("python", "host" or "layers") and `layers`, the unpacked
            layers of an image, lowest first.
        frozen: descriptors of frozen layers of another box, lowest first. They are used up.

    Attributes:
        returned: new descriptors of these layers.
        is_rooted: whether commands have a root of their own.
    """

    def __init__(self, limits: dict[str, Any], frozen: list[int]) -> None:
        disk_bytes, image = limits["disk"], limits["image"]
        self._inodes = max(256, disk_bytes >> 12)
        mount("box", "/mnt", "tmpfs", MS_NOSUID_NODEV, f"size={disk_bytes},nr_inodes={self._inodes},mode=0700")
        self.is_rooted = image != "python"
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
        self._last = len(frozen)
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
        self._inodes += INODES_OF_LAYER  # commands may have used up all others
        mount("box", ".", None, MS_REMOUNT | MS_NOSUID_NODEV, f"nr_inodes={self._inodes}")
        if self.is_rooted:
            unmount(ROOT)
        for path in self._own.values():
            unmount(path)
        unmount("own")
        tree = cloned_tree(f"l/{self._last}")
        self._last += 1
        self._begin_layer()
        return tree

    def enter(self, folder: str) -> None:
        """Enter the root and the working folder of commands, irrevocably for a process without capabilities. The folder
        is /box where a command has removed the given one."""
        if self.is_rooted:
            os.fchdir(self._place)
            os.chroot(ROOT)
        try:
            os.chdir(folder)
        except OSError:
            os.chdir("/box")

    def first_program(self, paths: Iterable[str]) -> str | None:
        """Return the first of these paths that is a program in the root of commands."""
        own = os.open("/", os.O_PATH)
        self.enter("/box")
        try:
            return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)
        finally:
            os.fchdir(own)
            os.chroot(".")
            os.close(own)
            os.chdir("/box")

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
        for name in ("dev", "proc", *(name for name in self._own if name != "shm")):
            _make_folder(f"{ROOT}/{name}")
            mount(f"/{name}", f"{ROOT}/{name}", None, MS_BIND | MS_REC)

    def _copy_host_root(self) -> None:
        """Fill the root as bubblewrap's: its links and small files, its folders of programs as parts, and what else it
        shows, which stays read-only."""
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


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _make_folder(path: str) -> None:
    """Make a folder in place of whatever else an image or a command left at a path, a link to elsewhere above all."""
    if os.path.lexists(path) and not _is_folder(path):
        os.unlink(path)
    os.makedirs(path, 0o755, exist_ok=True)
