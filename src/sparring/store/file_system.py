"""Detection of file systems that several machines share. A file there cannot be shared memory of all its readers, which
SQLite's write-ahead log needs, unless one connection alone opens it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Mounts of this process (proc(5)): per line the mount point (field 5), after a dash the type, source and options."""

REMOTE = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "panfs"),
        *("wekafs", "orangefs", "pvfs2", "ocfs2", "gfs2", "9p", "virtiofs", "vboxsf", "prl_fs"),
    )
)
"""Types of file systems that several machines share. Any FUSE type may be shared, too, except those in `LOCAL`."""
LOCAL = frozenset(("fuseblk", "fuse.fuse-overlayfs", "fuse.overlayfs"))
"""FUSE types of file systems that a single machine uses."""

LOCKS_HERE = frozenset(("nolock", "local_lock=all", "local_lock=flock", "localflock"))
"""Mount options of NFS and Lustre with which other machines do not see a lock."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """File system of a folder.

    Attributes:
        kind: type as the kernel names it, such as `ext4` or `nfs4`; empty if it is unknown.
    """

    kind: str
    options: frozenset[str] = frozenset()

    @property
    def remote(self) -> bool:
        """Whether processes on other machines may see the files."""
        return self.kind in REMOTE or self.kind.startswith("fuse") and self.kind not in LOCAL

    @property
    def locks_here_alone(self) -> bool:
        """Whether other machines do not see the locks."""
        return self.remote and not LOCKS_HERE.isdisjoint(self.options)


def file_system_of(path: Path, mounts: Path = MOUNTS) -> FileSystem:
    """Return the file system of a path, which need not exist.

    Args:
        mounts: file in the format of `MOUNTS`; an unreadable file names no file system.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return FileSystem(kind="")
    folder, depth, found = path.resolve(), -1, FileSystem(kind="")
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, _, *options) = before.split(" "), after.split(" ")
        point = Path(_ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if folder.is_relative_to(point) and len(point.parts) >= depth:  # of two at one point, the later hides the first
            depth = len(point.parts)
            found = FileSystem(kind=kind, options=frozenset(",".join((fields[5], *options)).split(",")))
    return found
