"""What the kernel holds for a box is bounded by its control group, and nothing of a group is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hogs
import pytest

from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.groups import BoxGroups, find_hierarchy, hierarchy_of_this_process
from sparring.sandbox.inner.confine import TCP_BYTES
from sparring.sandbox.inner.filter import ALLOWED, numbers
from sparring.types import BoxSpec

MB = 1 << 20
HIERARCHY = hierarchy_of_this_process()
USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
LEADERS = hogs.LEADERS.replace("EXIT", str(numbers(ALLOWED)["exit"]))
HOGS = {
    "sockets": hogs.SOCKETS.replace("PAIRS", "100"),
    "shared memory": hogs.SHARED,
    "shared memory of System V": hogs.SYSTEM_V,
    "exited leaders": LEADERS,
    "pipes": hogs.PIPES,
}


@pytest.fixture
def groups() -> Iterator[list[BoxGroups]]:
    """Groups whose folders must be gone at the end."""
    made: list[BoxGroups] = []
    yield made
    assert not [folder for pool in made for folder in pool.folders if folder.exists()]


def kernel_bytes() -> int:
    """Return the memory that the kernel holds for objects of its own and for pages of no process."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("SUnreclaim", "Shmem"))


async def held(code: str, *, is_grouped: bool, **spec: Any) -> tuple[Any, int]:
    """Run a program in a box of 64 MB. Return its result, and the most memory of its group."""
    boxes = BubblewrapBoxes(SandboxConfig(servers=1), hierarchy=HIERARCHY if is_grouped else None)
    try:
        box = await boxes.take(BoxSpec(**{"timeout_s": 20.0, "memory_bytes": 64 * MB, "processes": 40} | spec))
        running = asyncio.create_task(box.python(code))
        most = 0
        while not running.done():
            await asyncio.wait((running,), timeout=0.01)
            group = box.commands.group
            if group is not None:
                most = max(most, int((group.folders[0] / USED[HIERARCHY.version]).read_text()))
        return await running, most
    finally:
        await boxes.close()


FAMILIES = ["sockets", *(pytest.param(name, marks=pytest.mark.full) for name in HOGS if name != "sockets")]


@pytest.mark.groups
@pytest.mark.parametrize("hog", FAMILIES)
def test_a_group_holds_what_no_count_of_pages_shows(hog: str) -> None:
    result, most = asyncio.run(held(HOGS[hog], is_grouped=True))
    assert most <= 64 * MB * 5 // 4 + 32 * MB
    assert result.out_of_memory or hog == "pipes"
    assert most >= 32 * MB


@pytest.mark.full
@pytest.mark.parametrize("hog", ["sockets", "shared memory"])
def test_without_a_group_the_kernel_holds_more(hog: str) -> None:
    """The attack works where no group holds it, so what a group prevents is real."""
    before = kernel_bytes()

    async def most_held() -> int:
        running, most = asyncio.create_task(held(HOGS[hog], is_grouped=False)), 0
        while not running.done():
            await asyncio.wait((running,), timeout=0.01)
            most = max(most, kernel_bytes() - before)
        return most

    most = asyncio.run(most_held())
    assert most > (150 if hog == "shared memory" else 10) * MB


def test_netlink_and_vsock_are_refused(in_box: Any) -> None:
    code = "import socket\nfor family in (16, 40, 17, 38):\n try: print(socket.socket(family, 3, 0))\n except OSError as e: print(e.errno)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<socket.socket" in done.stdout  # plainly, netlink opens
    result = in_box(lambda box: box.python(code))
    assert result.stdout == "97\n" * 4
    result = in_box(lambda box: box.python(hogs.NETLINK))
    assert result.stdout == "OSError\n0\n"


def test_sizes_and_sessions_are_refused_without_a_group() -> None:
    code = (
        "import fcntl, os, socket\n"
        "def attempt(what):\n try: print(what() and 1)\n except OSError as error: print(error.errno)\n"
        "pair, pipe = socket.socketpair(), os.pipe()\n"
        "for option in (7, 8, 32, 33): attempt(lambda: pair[0].setsockopt(1, option, 1 << 20))\n"
        "attempt(lambda: fcntl.fcntl(pipe[0], 1031, 1 << 20))\n"
        "if os.fork() == 0:\n try: os.setsid()\n except OSError as error: os._exit(error.errno)\n os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    result, _ = asyncio.run(held(code, is_grouped=False))
    assert result.stdout.split() == ["1"] * 6
    if HIERARCHY is not None:
        result, _ = asyncio.run(held(code, is_grouped=True))
        assert result.stdout.split() == ["None", "1", "1", "1", "1", "0"]  # what waits unaccepted is in no group


CONNECTIONS = """
import errno, socket
family, host, ports = NUMBERS
def fill(port):
    client = socket.socket(family)
    client.setblocking(False)
    client.connect_ex((host, port))
    count = 0
    try:
        while True: count += client.send(b"x" * 65536)
    except BlockingIOError:
        client.close()
    return count
listening, most, connections = [], 0, 0
for port in range(7001, 7001 + ports):
    listening.append(socket.socket(family))
    listening[-1].bind((host, port))
    listening[-1].listen(4096)
    while count := fill(port):
        most, connections = max(most, count), connections + 1
        print(connections, most, flush=True)
"""
"""Fills connections that nobody accepts, as many as wait at a port, and tells how many and the most bytes of one."""


def test_connections_that_wait_at_a_port_are_few_and_hold_little(in_box: Any) -> None:
    """For other groups than the kernel's own count: what waits is in no group at all."""
    code = CONNECTIONS.replace("NUMBERS", "socket.AF_INET, '127.0.0.1', 1")
    result = in_box(lambda box: box.python(code), image="host", memory_bytes=256 * MB)
    connections, most = map(int, result.stdout.splitlines()[-1].split())
    assert (result.end, connections) == ("exited", 129), "the kernel takes one more than the setting"
    assert most <= 4 * TCP_BYTES


@pytest.mark.parametrize(
    "place", ["socket.AF_INET, '127.0.0.1'", "socket.AF_INET6, '::1'", "socket.AF_INET6, '::ffff:127.0.0.1'"]
)
def test_connections_that_wait_at_many_ports_are_out_of_memory(place: str, in_box: Any) -> None:
    code = CONNECTIONS.replace("NUMBERS", f"{place}, 200") + "import time; time.sleep(60)"
    result = in_box(lambda box: box.python(code), image="host", memory_bytes=64 * MB, timeout_s=50.0)
    assert (result.out_of_memory, result.end) == (True, "out of memory")


def test_connections_that_were_closed_are_not_counted(in_box: Any) -> None:
    """A thousand at once would be the box's memory; many more one after another are not."""
    code = (
        "import socket\n"
        "listening = socket.create_server(('127.0.0.1', 7001))\n"
        "for number in range(2000):\n"
        " with socket.create_connection(('127.0.0.1', 7001)) as client, listening.accept()[0] as taken:\n"
        "  client.send(b'x'); taken.recv(1)\n"
        "print(number)"
    )
    result = in_box(lambda box: box.python(code), image="host", memory_bytes=64 * MB)
    assert (result.stdout, result.end) == ("1999\n", "exited")


def test_locks_of_open_files_are_unknown_and_those_of_processes_work(in_box: Any) -> None:
    """F_OFD_GETLK, SETLK, SETLKW as in a kernel before 3.15; F_SETLK, which databases and dpkg need, as ever."""
    code = (
        "import fcntl, os, sqlite3, struct\n"
        "file, lock = open('f', 'wb'), struct.pack('hhqqixxxx', 1, 0, 0, 1, 0)\n"
        "for operation in (36, 37, 38, fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW):\n"
        " try: print(len(fcntl.fcntl(file, operation, lock)))\n"
        " except OSError as error: print(error.errno)\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "base = sqlite3.connect('base')\n"
        "with base: base.execute('create table t as select 7 as x')\n"
        "print(*base.execute('select x from t').fetchone())"
    )
    result = in_box(lambda box: box.python(code))
    assert result.stdout.split() == ["22", "22", "22", "32", "32", "32", "7"], result.stderr


@pytest.mark.groups
def test_commands_cannot_starve_their_box() -> None:
    """Commands that make themselves less likely to be killed than the box's own process do not end it."""
    code = "open('/proc/self/oom_score_adj', 'w').write('500')\n" + HOGS["sockets"]

    async def work() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        box = await boxes.take(BoxSpec(timeout_s=20.0, memory_bytes=64 * MB))
        for _ in range(3):
            result = await box.python(code)
            assert (result.out_of_memory, result.exit_code) == (True, 137)
        assert (await box.python("print(1)")).stdout == "1\n"
        await boxes.close()

    asyncio.run(work())


def test_commands_are_killed_before_everything_else(in_box: Any) -> None:
    code = "for pid in (1, 'self'): print(open(f'/proc/{pid}/oom_score_adj').read().strip())"
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    assert in_box(lambda box: box.python(code)).stdout.split() == [str(max(500, ours)), "1000"]
    assert int(Path("/proc/self/oom_score_adj").read_text()) == ours
    capabilities = next(line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line)
    if int(capabilities.split()[1], 16) >> 24 & 1:  # CAP_SYS_RESOURCE
        code = "open('/proc/self/oom_score_adj', 'w').write('0')"
        assert "PermissionError" in in_box(lambda box: box.python(code)).stderr


def test_inotify_and_signals_are_counted_for_each_box(in_box: Any) -> None:
    code = (
        "import ctypes, os, resource\nlibc = ctypes.CDLL(None)\ncount = 0\n"
        "while libc.inotify_init() >= 0: count += 1\nprint(count, resource.getrlimit(11)[0])"
    )
    assert in_box(lambda box: box.python(code)).stdout == "8 1024\n"


SPREAD = """
import asyncio, os, signal
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.types import BoxSpec
async def main():
    boxes = BubblewrapBoxes(SandboxConfig(servers=1))
    taken = [await boxes.take(BoxSpec(timeout_s=30.0)) for _ in range(3)]
    for box in taken: await box.python("1")
    print(*boxes.groups.folders, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.groups
def test_a_later_pool_sweeps_the_groups_of_a_killed_run(groups: list[BoxGroups]) -> None:
    done = subprocess.run([sys.executable, "-c", SPREAD], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [Path(folder) for folder in done.stdout.split()]
    assert left and all(folder.exists() for folder in left)

    async def work() -> None:
        ends = time.monotonic() + 20
        while any(folder.exists() for folder in left) and time.monotonic() < ends:
            pool = BoxGroups(HIERARCHY)
            groups.append(pool)
            group = pool.make(MB, MB, 1)
            assert group is not None
            pool.leave(group)
            await pool.close()
            await asyncio.sleep(0.05)  # the killed run's boxes are still ending

    asyncio.run(work())
    assert not [folder for folder in left if folder.exists()]


@pytest.mark.groups
def test_nothing_is_left_of_closed_boxes(groups: list[BoxGroups]) -> None:
    async def work() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        groups.append(boxes.groups)
        closed, open_one = [await boxes.take(BoxSpec(timeout_s=20.0)) for _ in range(2)]
        for box in (closed, open_one):
            await box.python("1")
        folders = [folder for box in (closed, open_one) for folder in box.commands.group.folders]
        assert all(folder.is_dir() for folder in folders)
        await closed.close()
        await boxes.close()
        assert not [folder for folder in folders if folder.exists()]

    asyncio.run(work())


@pytest.mark.groups
def test_a_program_of_an_image_may_reserve_more_than_it_uses() -> None:
    """As Java's machine does. A group counts what is used; without one, a limit of the address space holds."""
    code = "import mmap; held = mmap.mmap(-1, 8 << 30); print('reserved', flush=True); held[: 200 << 20] = bytes(200 << 20)"
    result, most = asyncio.run(held(code, is_grouped=True, image="host"))
    assert (result.stdout, result.out_of_memory) == ("reserved\n", True)
    assert most <= 64 * MB * 5 // 4 + 32 * MB
    assert "reserved" not in asyncio.run(held(code, is_grouped=False, image="host"))[0].stdout


@pytest.mark.groups
def test_each_box_has_a_share_of_the_processors() -> None:
    """All processes of a box's commands, in whatever session, are in its own group of the scheduler."""

    async def work() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        spinning, honest = [await boxes.take(BoxSpec(timeout_s=20.0)) for _ in range(2)]
        running = asyncio.create_task(spinning.python(hogs.SPIN))
        groups = None
        for _ in range(1000):  # until all spin
            await asyncio.wait((running,), timeout=0.02)
            groups = spinning.commands.group
            if groups is not None and len((groups.folders[-1] / "cgroup.procs").read_text().split()) == 15:
                break
        assert groups is not None
        pids = (groups.folders[-1] / "cgroup.procs").read_text().split()
        assert len(pids) == 15 and not running.done()
        assert len({os.getsid(int(pid)) for pid in pids}) > 1
        assert (await honest.python("print(1)")).stdout == "1\n"
        assert honest.commands.group.folders[-1] != groups.folders[-1]
        running.cancel()
        await boxes.close()

    asyncio.run(work())


MOUNTS_1 = """\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:3 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
GROUPS_1 = "9:name=systemd:/\n8:pids:/\n4:memory:/docker/abc/inner\n1:cpu,cpuacct:/run\n0::/x\n"


def test_places_of_groups_are_read_from_the_kernels_tables(tmp_path: Path) -> None:
    found = find_hierarchy(GROUPS_1, MOUNTS_1)
    assert found is not None
    assert (found.version, [str(folder) for folder in found.folders]) == (
        1,
        ["/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu,cpuacct/run"],
    )
    session = tmp_path / "user.slice/app.slice/run.scope"
    session.mkdir(parents=True)
    mounts = f"30 24 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate"
    assert find_hierarchy("0::/user.slice/app.slice/run.scope", mounts) is None
    (session.parent / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    assert find_hierarchy("0::/user.slice/app.slice/run.scope", mounts) == (2, (session.parent,))
    assert find_hierarchy("", "") is None
