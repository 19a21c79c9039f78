"""Memory that a process will soon need, asked of the machine while it does something else, such as importing torch.

The host of a virtual machine may take a second and more to give a GiB that nobody used of late. What a process has
written and left is there for the next, for a while, so helpers write it: `python room.py BYTES` does, and goes when its
standard input ends.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

MOST_HELPERS = 8
FREE = Path("/proc/meminfo")
GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def room(num_bytes: int) -> Iterator[None]:
    """Within, helpers ask for so much memory, on all cores but one; behind it, what came is free for this process.
    Nothing is asked where there is not twice as much, or where this cannot be known: other systems than Linux."""
    helpers = min(MOST_HELPERS, cores() - 1) if 0 < 2 * num_bytes <= free() else 0
    with ExitStack() as stack:
        for _ in range(helpers):
            command = [sys.executable, "-I", "-S", __file__, str(num_bytes // helpers)]
            nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with suppress(OSError):  # no process more: it goes without
                helper = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, **nowhere))
                stack.callback(helper.kill)
        yield


def free() -> int:
    """Bytes of memory that processes of this one's group could still have; 0 where the system does not say."""
    try:
        lines = FREE.read_text(encoding="ascii").splitlines()
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        found += [left for group in _groups() for left in left_in(group)]
    except (OSError, ValueError):
        return 0
    return min(found, default=0)


def cores() -> int:
    """Processors that this process may use, within its group's quota; at least 1, also where the system does not
    say."""
    try:
        shares = [share for group in _groups() for share in shares_in(group)]
        return max(1, int(min([len(os.sched_getaffinity(0)), *shares])))
    except (OSError, ValueError):
        return 1


def _groups() -> list[Path]:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    return [GROUPS / controllers / path.lstrip("/") for _, controllers, path in lines]


def shares_in(group: Path) -> list[float]:
    """Processors that the group and those around it may use, where they are bounded."""
    files = [place / "cpu.max" for place in (group, *group.parents)]
    bounds = [file.read_text().split() for file in files if file.is_file()]
    return [int(quota) / int(period) for quota, period in bounds if quota != "max"]


def left_in(group: Path) -> list[int]:
    """What the group and those around it may still have, where they are bounded; of either version of groups."""
    found = []
    for place in (group, *group.parents):
        for bound, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (place / bound).is_file() and (most := (place / bound).read_text().strip()) != "max":
                found.append(int(most) - int((place / use).read_text()))
    return found


def _write(num_bytes: int) -> None:
    """Write so many bytes, one in each page, and keep them until the standard input ends."""
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # the first to go where memory is short
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, num_bytes, mmap.PAGESIZE):
        memory[place] = 1
    os.read(0, 1)


if __name__ == "__main__":
    _write(int(sys.argv[1]))
