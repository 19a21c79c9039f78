"""Memory of the machine, or the smaller limit of its container or service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's memory, or the lowest limit of the process's
    control groups, above which the kernel kills it.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.max) and cgroup-v1/memory.rst.

    Args:
        root: root of the file system with `proc` and `sys`.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = base / group.lstrip("/")
        for folder in (inner, *inner.parents):
            written = _read(folder / ("memory.limit_in_bytes" if controllers else "memory.max")).strip()
            if written.isdecimal() and int(written):  # "max" means no limit
                yield int(written)
            if folder == base:  # a container may see its own group at the root
                break


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
