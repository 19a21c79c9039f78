"""Unpacking of one layer: entries of a tar become a folder that overlayfs can stack on the layers below it.

A deletion becomes a character device 0/0, and a folder that hides the layers below has the attribute
`user.overlay.opaque` (overlayfs.rst; mounted with `userxattr`). Owners, setuid bits and extended attributes are
dropped: in a box, one user owns every file. That user may read and write what root could: owners' bits are added.

Every change is made relative to an open folder of the layer (`LayerTree._opened`), which is opened without following
links. So if an entry has replaced a folder with a link, the change fails, and never leaves the layer.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.sandbox.images.image import Bounds
from sparring.sandbox.images.streams import PIECE_BYTES, SAVE, TarStream, members

HIDING, OPAQUE = ".wh.", ".wh..wh..opq"
"""Beginning of the name of an entry that deletes another, and the entry that hides all that is below its folder."""
ATTRIBUTE = "user.overlay.opaque"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_LINKS = 40
MOST_DEPTH = 256
"""Maximum number of folders above an entry."""
LATEST_S = 1 << 33
"""Latest time of change that is kept, in seconds since 1970."""


class LayerTree:
    """Layer that is being unpacked.

    Args:
        lower: the layers below, topmost first; paths may lead through their links and folders.
        owner: arguments of chown for everything in the layer; None leaves the owner.

    Attributes:
        num_bytes: bytes of its files.
        num_entries: number of its files, folders and links.
        left_out: number of devices.
    """

    def __init__(self, tree: Path, lower: Sequence[Path], owner: tuple[int, int] | None, bounds: Bounds) -> None:
        self._tree = str(tree)
        self._stack = [self._tree, *map(str, lower)]
        self._owner = owner
        self._bounds = bounds
        self._known: dict[str, str] = {}
        """Cache: path of a folder in the image -> its path in this layer."""
        self._followed: set[str] = set()
        """Paths in this layer of the links that cached paths lead through; an entry there empties the cache."""
        self._times: dict[str, float] = {}
        self.num_bytes = self.num_entries = self.left_out = 0

    def unpack(self, stream: TarStream) -> None:
        """Unpack every entry.

        Raises:
            BadInput: an entry leads out of the image, is of an unknown kind, has a file or a loop of links among its
                parents, or exceeds the bounds; or the layer is truncated.
        """
        with self._opened(self._tree) as folder:
            self._own(".", folder, 0o755)
        for member in members(stream):
            self.num_entries += 1
            where = f"{stream.where}: {member.name!r}"
            if self.num_entries > self._bounds.num_entries:
                remedy = "if you trust it, allow more (--most-files)"
                raise refusal(stream.where, f"at most {self._bounds.num_entries} files in an image", "more", remedy)
            try:
                self._add(member, stream, where)
            except (OSError, ValueError) as error:
                words = error.strerror if isinstance(error, OSError) else None
                remedy = f"{SAVE}; or use a disk with devices of overlayfs and user attributes (XDG_CACHE_HOME)"
                raise refusal(where, "an entry that can be unpacked", words or str(error), remedy) from error
        for path, time in self._times.items():
            try:
                with self._opened(path) as folder:
                    os.utime(folder, (time, time))
            except OSError:
                pass  # a later entry has removed it, or put a link in its place or above it

    def _add(self, member: tarfile.TarInfo, stream: TarStream, where: str) -> None:
        parts = _parts(member.name, where)
        if not parts:
            if member.isdir():
                with self._opened(self._tree) as folder:
                    os.fchmod(folder, _mode(member))
            return
        name = parts[-1]
        if name.startswith(HIDING):
            self._hide(parts[:-1], name, where)
            return
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk() or member.isfifo()):
            if not member.isdev():
                raise refusal(where, "a file, folder, link or pipe", f"an entry of type {member.type!r}", SAVE)
            self.left_out += 1
            return
        source = self._linked(member, where) if member.islnk() else ""
        path = f"{self._folder(parts[:-1], where)}/{name}"
        if source and os.path.lexists(path) and os.path.samestat(os.lstat(source), os.lstat(path)):
            return
        with self._opened(os.path.dirname(path)) as folder:
            hid_folder = self._make_room(name, folder, path, member)
            if member.isreg():
                self._write(name, folder, member, stream, where)
            elif member.issym():
                os.symlink(member.linkname, name, dir_fd=folder)
            elif member.islnk():
                with self._opened(os.path.dirname(source)) as other:
                    linked = os.path.basename(source)
                    os.link(linked, name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
            elif member.isfifo():
                os.mkfifo(name, dir_fd=folder)
            elif not os.path.isdir(path):
                os.mkdir(name, dir_fd=folder)
            if not member.islnk():
                self._own(name, folder, None if member.issym() else _mode(member))
                os.utime(name, (_time(member),) * 2, dir_fd=folder, follow_symlinks=False)
        if member.isdir():
            self._times[path] = _time(member)
            if hid_folder:
                self._make_opaque(path)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        """Open a folder of this layer, or of a layer below. Raises OSError if its path has a link."""
        tree = next(tree for tree in self._stack if f"{path}/".startswith(f"{tree}/"))
        folder = os.open(tree, FOLDER)
        try:
            for name in path[len(tree) :].split("/")[1:]:
                inner = os.open(name, FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _make_room(self, name: str, folder: int, path: str, member: tarfile.TarInfo) -> bool:
        """Remove this layer's entry at a path. Return True if the entry was a deletion mark for the layers below."""
        try:
            kind = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            if path in self._followed:
                self._known.clear()
            return False
        if stat.S_ISDIR(kind.st_mode):
            if not member.isdir():
                shutil.rmtree(name, dir_fd=folder)
                self._known.clear()
            return False
        os.unlink(name, dir_fd=folder)
        self._known.clear()
        return _is_hidden(kind)

    def _write(self, name: str, folder: int, member: tarfile.TarInfo, stream: TarStream, where: str) -> None:
        if self.num_bytes + member.size > self._bounds.num_bytes:
            remedy = "if you trust it, allow more (--most-bytes)"
            actual = f"{self.num_bytes + member.size} or more"
            raise refusal(where, f"at most {self._bounds.num_bytes} bytes in an image", actual, remedy)
        self.num_bytes += member.size
        new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with open(new, "wb", buffering=0) as file:
            missing = member.size
            while missing:
                piece = stream.take(min(PIECE_BYTES, missing))
                if not piece:
                    raise EOFError("it ends within this file")
                missing -= len(piece)
                while piece:
                    piece = piece[file.write(piece) :]

    def _own(self, name: str, folder: int, mode: int | None) -> None:
        """Give a new entry of a folder its owner and `mode`. `mode` is None for links and devices, whose mode stays."""
        if self._owner is not None:
            os.chown(name, *self._owner, dir_fd=folder, follow_symlinks=False)
        if mode is not None:
            file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fchmod(file, mode)
            finally:
                os.close(file)

    def _make_opaque(self, path: str) -> None:
        if len(self._stack) > 1:
            with self._opened(path) as folder:
                os.setxattr(folder, ATTRIBUTE, b"y")

    def _hide(self, parents: list[str], name: str, where: str) -> None:
        """Mark an entry of the layers below as deleted; entries of this layer itself stay."""
        hidden = name.removeprefix(HIDING)
        if name == OPAQUE:
            self._make_opaque(self._folder(parents, where))
            self._known.clear()
            return
        if hidden.startswith(HIDING):  # bookkeeping of aufs
            return
        if hidden in ("", ".", ".."):
            raise refusal(where, "the name of a deleted entry", repr(hidden), SAVE)
        parent = self._folder(parents, where)
        path = f"{parent}/{hidden}"
        if os.path.lexists(path):
            if os.path.isdir(path) and not os.path.islink(path):
                self._make_opaque(path)
        elif self._find(self._stacked(parent), hidden) is not None:
            with self._opened(parent) as folder:
                os.mknod(hidden, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=folder)  # no privilege since Linux 5.8
                self._own(hidden, folder, None)
        self._known.clear()

    # ---- paths, as the box will see them: this layer over those below ----

    def _linked(self, member: tarfile.TarInfo, where: str) -> str:
        """Return the path of the file that a hard link names, in this layer or below."""
        parts = _parts(member.linkname, where)
        found = parts and self._find(self._stacked(self._folder(parts[:-1], where)), parts[-1])
        if not found or stat.S_ISDIR(os.lstat(found[0]).st_mode):
            actual = f"a link to {member.linkname!r}, which is {'a folder' if found else 'not there'}"
            raise refusal(where, "a link to a file of the image", actual, SAVE)
        return str(found[0])

    def _stacked(self, folder: str) -> list[str]:
        """Return the folders that the box will see as one, for a folder of this layer, topmost first."""
        inner = folder[len(self._tree) :].split("/")[1:]
        stack = list(self._stack)
        for name in inner:
            stack = self._find(stack, name) or []
        return stack

    def _find(self, stack: Sequence[str], name: str) -> list[str] | None:
        """Return the paths that a box sees under a name in stacked folders: one path of a file or link, or those of
        folders, topmost first. None if the name does not exist."""
        found: list[str] = []
        for at, folder in enumerate(stack):
            if at and _is_opaque(stack[at - 1]):
                break
            path = f"{folder}/{name}"
            try:
                kind = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not stat.S_ISDIR(kind.st_mode):
                return found or (None if _is_hidden(kind) else [path])
            found.append(path)
        return found or None

    def _folder(self, parts: list[str], where: str) -> str:
        """Return the path in this layer of a folder, made where it is missing. Links are followed within the image.

        Raises:
            BadInput: the path leads through a file or a loop of links.
        """
        key = "/".join(parts)
        if (known := self._known.get(key)) is not None:
            return known
        path, rest, links = [self._tree], list(reversed(parts)), 0
        while rest:
            name = rest.pop()
            if name in ("", ".", ".."):
                if name == ".." and len(path) > 1:
                    path.pop()
                continue
            inner = f"{path[-1]}/{name}"
            found = self._find(self._stacked(path[-1]), name)
            if found is None or os.path.isdir(found[0]) and not os.path.islink(found[0]):
                self._make_folder(inner, found)
                path.append(inner)
            elif os.path.islink(found[0]):
                links += 1
                self._followed.add(inner)
                if links > MOST_LINKS or len(path) + len(rest) > MOST_DEPTH:
                    raise refusal(where, "a folder as parent", f"a loop of links at {name!r}", SAVE)
                target = os.readlink(found[0])
                path = [self._tree] if target.startswith("/") else path
                rest += reversed(target.split("/"))
            else:
                raise refusal(where, "a folder as parent", f"{name!r}, which is not one", SAVE)
        self._known[key] = path[-1]
        return path[-1]

    def _make_folder(self, path: str, found: list[str] | None) -> None:
        if found and found[0] == path:
            return
        is_hidden = os.path.lexists(path)
        above, name = os.path.split(path)
        below = os.lstat(found[0]) if found else None
        with self._opened(above) as folder:
            if is_hidden:
                os.unlink(name, dir_fd=folder)
            os.mkdir(name, dir_fd=folder)
            self._own(name, folder, 0o755 if below is None else stat.S_IMODE(below.st_mode))
        self.num_entries += 1
        if below is not None:
            self._times[path] = below.st_mtime
        if is_hidden:
            self._make_opaque(path)


def is_base(tree: Path) -> bool:
    """Return True if a layer hides all layers below it."""
    return _is_opaque(str(tree))


def _parts(name: str, where: str) -> list[str]:
    """Return the parts of a path in the image, whose root is its `/`."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise refusal(where, "a path inside the image", repr(name), SAVE)
    if len(parts) > MOST_DEPTH:
        raise refusal(where, f"at most {MOST_DEPTH} folders above an entry", str(len(parts)), SAVE)
    return parts


def _mode(member: tarfile.TarInfo) -> int:
    return member.mode & 0o1777 | (0o700 if member.isdir() else 0o600)


def _time(member: tarfile.TarInfo) -> float:
    return member.mtime if 0 <= member.mtime <= LATEST_S else 0


def _is_hidden(kind: Any) -> bool:
    return stat.S_ISCHR(kind.st_mode) and kind.st_rdev == 0


def _is_opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, ATTRIBUTE, follow_symlinks=False) == b"y"
    except OSError:
        return False
