"""Memory of a machine that is a container: the kernel's limit counts, not what stands in the box."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparring.stages.preflight.machine import machine_memory

ALL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
SMALL, SMALLER = ALL // 2, ALL // 4
V2, V1 = "0::/a.slice/run.scope\n", "5:cpu,cpuacct:/\n4:memory:/docker/1e9\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        (V2, {"a.slice/run.scope/memory.max": f"{SMALL}\n"}, SMALL),
        (V2, {"a.slice/run.scope/memory.max": "max\n", "a.slice/memory.max": f"{SMALLER}\n"}, SMALLER),
        (V2, {"a.slice/run.scope/memory.max": f"{SMALLER}\n", "a.slice/memory.max": f"{SMALL}\n"}, SMALLER),
        ("0::/\n", {"memory.max": f"{SMALL}\n"}, SMALL),  # a group namespace of its own
        (V1, {"memory/docker/1e9/memory.limit_in_bytes": f"{SMALL}\n"}, SMALL),
        (V1, {"memory/memory.limit_in_bytes": f"{SMALL}\n"}, SMALL),  # mounted as the container's root
        (V1, {"memory/docker/1e9/memory.limit_in_bytes": "9223372036854771712\n"}, ALL),
        (V2, {"a.slice/run.scope/memory.max": "max\n"}, ALL),
        (V2, {"a.slice/run.scope/memory.max": "\u00b2 what"}, ALL),
        (V2, {}, ALL),
        ("nothing of this form\n", {}, ALL),
        ("", {}, ALL),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, groups: str, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for file, written in limits.items():
        (tmp_path / "sys/fs/cgroup" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / file).write_text(written)
    assert machine_memory(tmp_path) == expected


def test_a_machine_that_does_not_say_has_all_of_its_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) == ALL
