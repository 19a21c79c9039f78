"""Attacks on the roots and layers of boxes: between boxes, from a box on its frozen layers, and of a fork on others."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sparring.errors import BadInput

ACTS = """
import fcntl, os, subprocess
held = open("/usr/bin/env")
fcntl.flock(held, fcntl.LOCK_EX)
os.write(201, b"l")
os.read(200, 1)
subprocess.run(["/usr/bin/cksum", "/dev/null"], stdout=subprocess.DEVNULL)
os.write(201, b"s")
os.read(200, 1)
"""
LOOKS = """
import ctypes, fcntl, os
watch = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
assert ctypes.CDLL(None).inotify_add_watch(watch, b"/usr/bin", 0x20) >= 0  # IN_OPEN
os.read(200, 1)
with open("/usr/bin/env") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
os.read(watch, 65536)  # its own opening
os.write(201, b"g")
os.read(200, 1)
try:
    print("seen", len(os.read(watch, 4096)) > 0)
except BlockingIOError:
    print("nothing")
"""


@pytest.mark.parametrize(("image", "seen"), [("python", "held\nseen True\n"), ("host", "free\nnothing\n")])
def test_locks_and_watches_are_no_channels_between_overlays(in_box: Any, image: str, seen: str) -> None:
    """Two boxes on the host's own files pass bits by a lock on one, and see what the other starts."""
    result = in_box(lambda box: box.converse(LOOKS, ACTS), image=image)
    assert (result.stdout, result.stderr) == (seen, "")


@pytest.mark.parametrize("image", ("python", "host"))
def test_no_command_reaches_frozen_layers(in_box: Any, image: str) -> None:
    """A command that changed one would change what a verifier is a fork of."""
    code = """
import os
found = []
for place in ("/mnt", "/layers", "/l", "/proc/1/root", "/proc/1/cwd", "/proc/1/fd", "/box/../../mnt", "/proc/self/root/mnt"):
    try: found += [f"{place}/{name}" for name in os.listdir(place)]
    except OSError: pass
for number in range(3, 1024):
    try: os.fstat(number)
    except OSError: continue
    found.append(number)
for call in (lambda: os.chroot("/tmp"), lambda: os.fchdir(os.open("..", os.O_RDONLY)) or os.chroot(".")):
    try: call(); found.append("chroot")
    except OSError: pass
print(found)
"""

    async def work(box: Any) -> tuple[str, bytes]:
        await box.write("prepared", b"as it was")
        await box.snapshot()
        said = await box.python(code)
        await box.exec(
            [
                "sh",
                "-c",
                "echo forged > prepared; rm -rf /box/* /tmp/* /etc/new 2>/dev/null; find /box /tmp /dev /mnt -name prepared -exec sh -c 'echo x > {}' ';'",
            ]
        )
        verifier = await box.verifier([])
        return said.stdout, await verifier.read("prepared")

    assert in_box(work, image=image) == ("[]\n", b"as it was")


def test_a_fork_s_changes_reach_no_other_fork(in_box: Any) -> None:
    async def work(box: Any) -> set[bytes]:
        await box.write("file", b"prepared")
        await box.write("large", bytes(1 << 20))
        kept = await box.snapshot()
        spoils = "echo x >> file; chmod 0 file; ln large link; truncate -s 0 link; mv large moved; rm file; setfattr 2>/dev/null; mkdir file"
        evil = await box.fork(kept)
        await evil.exec(["sh", "-c", spoils])
        others = [await box.fork(kept), await box.fork(await evil.snapshot()), await box.fork(kept)]
        await others[1].exec(["sh", "-c", "rm -r *; echo y > large"])
        return {await one.read("file") + b"%d" % len(await one.read("large")) for one in (others[0], others[2], box)}

    assert in_box(work, image="host") == {b"prepared1048576"}


def test_an_unprivileged_command_cannot_use_user_zero(in_box: Any) -> None:
    """The calls that pretend give nothing: owners stay, and nothing of the kernel's opens."""
    code = """
import os
def attempt(call):
    try: call(); return "done"
    except OSError as error: return type(error).__name__
open("file", "w")
print(attempt(lambda: os.chown("file", 5, 5)), os.stat("file").st_uid, attempt(lambda: os.setuid(5)), os.getuid())
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")])
print(attempt(lambda: os.mknod("device", 0o60600, 0x801)), attempt(lambda: os.chroot("/tmp")), attempt(lambda: os.kill(1, 9)))
print(attempt(lambda: open("/proc/1/mem", "rb")), attempt(lambda: open("/usr/bin/env", "ab")), attempt(lambda: os.sethostname("x")) if hasattr(os, "sethostname") else "PermissionError")
"""
    said = in_box(lambda box: box.python(code), image="host", user=0).stdout.splitlines()
    assert said[0] == "done 0 done 0"
    assert said[1] == "['0000000000000000']"
    assert said[2].split()[:2] == ["PermissionError", "PermissionError"]
    assert said[3].split() == ["PermissionError"] * 3


FORKS = r"""
#include <fcntl.h>
#include <unistd.h>
int main(void) {
    char text[300];
    int proc = open("/proc", O_RDONLY | O_DIRECTORY), seen = open("/tmp/seen", O_CREAT | O_WRONLY | O_APPEND, 0666);
    for (;;) {
        int file = openat(proc, "cmdline", O_RDONLY), count = read(file, text, sizeof text);
        if (count > 0) write(seen, text, count);
        close(file);
        if (fork() > 0) _exit(0);
    }
}
"""


@pytest.mark.full
@pytest.mark.program("gcc")
def test_who_forks_faster_than_a_snapshot_looks_does_not_outlive_it(in_box: Any, tmp_path: Path) -> None:
    """It would change frozen files, and see what is covered in /proc once the root is taken apart around it."""
    (tmp_path / "forks.c").write_text(FORKS)
    subprocess.run(["gcc", "-static", "-o", tmp_path / "forks", tmp_path / "forks.c"], check=True)

    async def work(box: Any) -> str:
        await box.write("forks", (tmp_path / "forks").read_bytes())
        await box.exec("chmod +x forks")
        await (await box.start("./forks & exit 0")).wait()
        with suppress(BadInput):
            await box.snapshot()
        return (await box.exec("cat /tmp/seen; echo end")).stdout

    assert [in_box(work, image="host", processes=64) for _ in range(20)] == ["end\n"] * 20
