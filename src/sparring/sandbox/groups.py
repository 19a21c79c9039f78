"""Control groups of boxes: limits on a box's memory (also the kernel's for it), processes and processor time.

A group for each box lies in a folder of this process, inside the group that this process is in (version 1) or beside it
(version 2, where a group with processes has no groups inside), so limits on Sparring as a whole hold for its boxes too.
Version 2 is unverified: no machine with it has run this.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CONTROLLERS = ("memory", "pids", "cpu")
OVERHEAD_BYTES = 24 << 20
"""Bytes that a group may hold beyond the box's memory limit: page tables, kernel stacks, open files."""
ENDING_S = 2.0
"""Seconds that processes of closed boxes may take to end."""
NAME = re.compile(r"sparring-(\d+)-(\d+)-(\d+)-\d+")
"""Name of a process's folder for groups: pid namespace, process id, start time in ticks, number."""


class Hierarchy(NamedTuple):
    """Folders in which groups of boxes can be made.

    Attributes:
        version: 1 or 2.
        folders: parent folders; in version 1 one for each of `CONTROLLERS`, in version 2 one for all.
    """

    version: int
    folders: tuple[Path, ...]


def find_hierarchy(groups: str, mounts: str) -> Hierarchy | None:
    """Return the hierarchy of a process; None if a controller is missing, or they are divided between versions.

    Args:
        groups: content of the process's /proc/PID/cgroup.
        mounts: content of its /proc/PID/mountinfo.
    """
    places: dict[str, Path] = {}
    paths = {words[1]: words[2] for words in (line.split(":", 2) for line in groups.splitlines()) if len(words) == 3}
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        kind, options = right.split()[0], right.split()[-1].split(",")
        root, mounted = left.split()[3:5]
        if kind == "cgroup2" and "" in paths:
            places.setdefault("", _folder(paths[""], root, mounted))
        for names, path in paths.items():
            if kind == "cgroup" and names and set(names.split(",")) <= set(options):
                for controller in set(names.split(",")) & set(CONTROLLERS):
                    places.setdefault(controller, _folder(path, root, mounted))
    if all(controller in places for controller in CONTROLLERS):
        return Hierarchy(1, tuple(places[controller] for controller in CONTROLLERS))
    for folder in (places[""], *places[""].parents) if "" in places else ():
        if set(CONTROLLERS) <= _words(folder / "cgroup.subtree_control"):
            return Hierarchy(2, (folder,))
    return None


def _folder(path: str, root: str, mounted: str) -> Path:
    """Return the folder of the group `path` in a hierarchy whose folder `root` is mounted at `mounted`."""
    inner = path.removeprefix(root) if root != "/" and path.startswith(root) else path if root == "/" else ""
    return Path(mounted + inner)


def _words(file: Path) -> set[str]:
    try:
        return set(file.read_text().split())
    except OSError:
        return set()


def hierarchy_of_this_process() -> Hierarchy | None:
    """Return the hierarchy for groups of this process if it may make groups there, else None."""
    try:
        texts = [Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "mountinfo")]
    except OSError:
        return None
    found = find_hierarchy(*texts)
    if found is None or not all(os.access(folder, os.W_OK | os.X_OK) for folder in found.folders):
        return None
    return found


class BoxGroup:
    """Group of one box."""

    def __init__(self, version: int, folders: Sequence[Path]) -> None:
        self._version = version
        self.folders = tuple(folders)
        self._seen = 0

    def limit(self, memory_bytes: int, processes: int) -> None:
        """Make the group, with limits. `memory_bytes` bounds all memory of its processes: pages, files in memory,
        buffers of sockets and pipes."""
        for folder in self.folders:
            folder.mkdir()
        memory, pids = self.folders[0], self.folders[self._version % 2]
        if self._version == 1:
            _write(memory / "memory.limit_in_bytes", str(memory_bytes))
            _write(memory / "memory.memsw.limit_in_bytes", str(memory_bytes), optional=True)
            _write(memory / "memory.kmem.tcp.limit_in_bytes", str(memory_bytes), optional=True)
        else:
            _write(memory / "memory.max", str(memory_bytes))
            _write(memory / "memory.swap.max", "0", optional=True)
        _write(pids / "pids.max", str(processes))

    def doors(self) -> list[int]:
        """Return open files; a process with one thread enters the group by writing "0". The caller closes them."""
        name = "tasks" if self._version == 1 else "cgroup.procs"  # a whole process waits for a lock of all processes
        return [os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders]

    def killed(self) -> bool:
        """Return True if the kernel has killed a process of the group for its memory since the last call."""
        name, word = ("memory.oom_control", "oom_kill") if self._version == 1 else ("memory.events", "oom_kill")
        try:
            lines = (self.folders[0] / name).read_text().splitlines()
        except OSError:
            return False
        count = next((int(line.split()[1]) for line in lines if line.split()[:1] == [word]), 0)
        has_grown, self._seen = count > self._seen, count
        return has_grown

    def remove(self) -> bool:
        """Remove the group. Return False if a process in the group has not ended yet."""
        return all([_remove(folder) for folder in self.folders])


class BoxGroups:
    """Groups of the boxes of one pool. Without a hierarchy no group is made.

    Attributes:
        folders: folders that contain the pool's groups; empty before the first group.
    """

    _pools = 0

    def __init__(self, hierarchy: Hierarchy | None) -> None:
        self._hierarchy = hierarchy
        self.folders: tuple[Path, ...] = ()
        self._made: set[BoxGroup] = set()
        self._leaving: set[BoxGroup] = set()
        self._count = 0

    def make(self, memory_bytes: int, disk_bytes: int, processes: int) -> BoxGroup | None:
        """Return a new group for a box, or None without control groups. Files of a box lie in memory, so `disk_bytes`
        is added to the memory limit."""
        if self._hierarchy is None:
            return None
        self._remove_ended()
        if not self.folders or not self.folders[0].exists():
            self.folders = self._make_folders(self._hierarchy)
        self._count += 1
        group = BoxGroup(self._hierarchy.version, [folder / f"box-{self._count}" for folder in self.folders])
        group.limit(memory_bytes + memory_bytes // 8 + disk_bytes + OVERHEAD_BYTES, 2 * processes + 16)
        self._made.add(group)
        return group

    def leave(self, group: BoxGroup) -> None:
        """Remove a group, now or when its processes have ended."""
        self._made.discard(group)
        self._leaving.add(group)
        self._remove_ended()

    def _remove_ended(self) -> None:
        self._leaving = {group for group in self._leaving if not group.remove()}

    async def close(self) -> None:
        """Remove the remaining groups, at most `ENDING_S` seconds later, once their processes have ended. A later pool
        removes those that are left."""
        clock = asyncio.get_running_loop().time
        ends = clock() + ENDING_S
        self._leaving |= self._made  # those of boxes that nobody closed
        self._made.clear()
        while True:
            self._remove_ended()
            if not self._leaving or clock() > ends:
                break
            await asyncio.sleep(0.005)
        for folder in self.folders:
            _remove(folder)

    def _make_folders(self, hierarchy: Hierarchy) -> tuple[Path, ...]:
        """Make this pool's folders, and remove those of processes that are gone."""
        for parent in hierarchy.folders:
            for folder in parent.glob("sparring-*"):
                if (told := NAME.fullmatch(folder.name)) and _is_gone(*told.groups()):
                    for inner in folder.iterdir():
                        if inner.is_dir():
                            _remove(inner)
                    _remove(folder)
        BoxGroups._pools += 1
        name = f"sparring-{_namespace()}-{os.getpid()}-{_start_of(os.getpid())}-{BoxGroups._pools}"
        folders = tuple(parent / name for parent in hierarchy.folders)
        for folder in folders:
            folder.mkdir()
            if hierarchy.version == 2:
                _write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS))
        return folders


def pass_doors(box: socket.socket, group: BoxGroup | None) -> None:
    """Send a new box the files by which its commands enter its group, with the socket's first byte."""
    doors = [] if group is None else group.doors()
    try:
        socket.send_fds(box, [b"g"], doors)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the box has ended, as whoever reads the socket hears
    finally:
        for door in doors:
            os.close(door)


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _start_of(pid: int) -> str | None:
    """Return the time at which a process started, in ticks; None if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _is_gone(namespace: str, pid: str, start: str) -> bool:
    """Return True if a process of this pid namespace has ended. A process of another namespace is invisible: False."""
    return namespace == _namespace() and _start_of(int(pid)) != start


def _write(file: Path, text: str, *, optional: bool = False) -> None:
    try:
        file.write_text(text)
    except OSError:
        if not optional:
            raise


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
