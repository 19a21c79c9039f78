"""What is left of a process that holds boxes once it is killed with `kill -9`, at any moment: nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from suite import short_of

from sparring.sandbox.groups import BoxGroups, hierarchy_of_this_process

HOLDS = """
import asyncio, itertools
from dataclasses import replace
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec

async def play(boxes, spec):
    box = await boxes.take(spec)
    shell = await box.shell()
    terminal = await box.terminal(["sh"])
    acts = (
        lambda: box.exec("setsid sleep 1000 & head -c 2000000 /dev/zero > large"),
        lambda: box.start("trap '' TERM HUP; sleep 1000 & wait"),
        lambda: shell.run("sleep 1000 & cd /tmp"),
        lambda: terminal.type("sleep 1000 &"),
        lambda: box.upload({"tree/file": b"x"}),
        lambda: box.write("answer", b"42"),
        lambda: box.converse("1", "import os; os.fork(); 1"),
        lambda: box.snapshot(ends=True),
        lambda: box.verifier(["answer"]),
    )
    for act in itertools.chain(acts, (acts[0], acts[7])):
        print("acts", flush=True)
        made = await act()
    fork = await box.fork(made)
    await fork.exec("sleep 1000 & rm -r tree")

async def main():
    boxes = BubblewrapBoxes(SandboxConfig(servers=2))
    spec = BoxSpec(timeout_s=60.0, disk_bytes=64 << 20)
    while True:
        await asyncio.gather(*(play(boxes, replace(spec, image=image)) for image in ("python", "host")))

asyncio.run(main())
"""
WATCHES = """
import ctypes, os, random, select, signal, subprocess, sys
draw = random.Random(int(sys.argv[1]))
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: whoever loses its parent comes to this process
holder = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
for _ in range(draw.randrange(40)):
    assert holder.stdout.readline() == b"acts\\n", holder.wait()
select.select([holder.stdout], [], [], draw.uniform(0.0, 0.03))
holder.kill()
print(holder.pid)
try:
    while True:
        os.wait()
except ChildProcessError:
    print("all have ended")
"""


@pytest.mark.parametrize("moment", short_of(range(50), {30}))
def test_kill_9_leaves_no_process_mount_group_layer_or_file(moment: int, tmp_path: Path) -> None:
    """A layer is a mount of a box's own namespace, and ends with its processes."""
    mounts = Path("/proc/self/mountinfo").read_text()
    places = {name: tmp_path / name for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME")}
    for place in places.values():
        place.mkdir()
    command = [sys.executable, "-c", WATCHES, str(moment), HOLDS]
    ended = subprocess.run(command, capture_output=True, env={**os.environ, **places}, timeout=60, text=True)
    assert ended.stdout.split("\n", 1)[1:] == ["all have ended\n"], ended.stderr
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert [str(path) for place in places.values() for path in place.rglob("*")] == []
    assert groups_after_a_sweep(int(ended.stdout.split()[0])) == []


def groups_after_a_sweep(pid: int) -> list[Path]:
    """Return the folders of control groups that a process made for its boxes, once another pool has made its own."""
    hierarchy = hierarchy_of_this_process()
    if hierarchy is None:
        return []
    groups = BoxGroups(hierarchy)
    groups.make(1 << 24, 0, 1)
    asyncio.run(groups.close())
    return [found for folder in hierarchy.folders for found in folder.glob(f"sparring-*-{pid}-*")]
