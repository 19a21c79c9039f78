"""`sparring sandbox doctor`: what this machine enforces for boxes, by what, and what a missing part costs."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from sparring.errors import BadInput
from sparring.sandbox.check import check_sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.groups import BoxGroups, hierarchy_of_this_process
from sparring.sandbox.images.store import store_folder
from sparring.sandbox.inner.filter import COLUMNS
from sparring.sandbox.mounts import box_identity, unreadable_part

CAP_SYS_RESOURCE = 24
OVERLAY = (
    "mount -t tmpfs tmpfs /tmp && cd /tmp && mkdir low up work root && mknod low/gone c 0 0 && "
    "mount -t overlay overlay -o userxattr,lowerdir=low,upperdir=up,workdir=work root && echo x > root/new"
)


class Enforcement(NamedTuple):
    """Requirement or limit of boxes, and how this machine enforces it.

    Attributes:
        what: name of the requirement.
        holds: whether this machine enforces it.
        how: what enforces it, or what was found instead.
        cost: what its absence costs, and what to do; "" where it holds.
    """

    what: str
    holds: bool
    how: str
    cost: str = ""


def examine(config: SandboxConfig | None = None) -> list[Enforcement]:
    """Return what this machine enforces for boxes; each finding is made by trying it."""
    config = config or SandboxConfig()
    try:
        check_sandbox(config)
    except BadInput as error:
        return [Enforcement("boxes", False, "a box does not start", str(error))]
    version = subprocess.run([config.bwrap, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return [
        Enforcement("boxes", True, f"{version}; own user, mount, process, IPC and network namespaces"),
        _filter(),
        *_groups(),
        _user(config.user),
        Enforcement("files of a box", True, "a tmpfs of disk_bytes"),
        Enforcement("counts of a user", True, "inotify: 8 instances, 8192 watches a box; 1024 queued signals a box"),
        Enforcement(
            "pipes, passed descriptors",
            False,
            "counted for all boxes together; none can keep another box from what its own process passes",
            "a box that opens 1,024 pipes leaves others pipes of 8 KB; one that has 256 descriptors under way stops "
            "commands of others from passing any",
        ),
        Enforcement(
            "memory in no group",
            False,
            "TCP: 64 KB a socket, counted as memory of its box; record locks (fcntl F_SETLK, as dpkg needs): not held",
            "TCP may take more for 0.2 s (149 MB seen at 64 MiB); four processes held 100 MB of locks after 5 s",
        ),
        Enforcement(
            "watches on files of /usr",
            False,
            "refused by none: tail, node and editors need inotify",
            "boxes of python see which of these the host and others of them open, and when; do: box.image = 'host'",
        ),
        _killer(),
        _overlay(config.user),
        _store(config.user),
    ]


def _user(user: int) -> Enforcement:
    """Return the finding on the boxes' user id; `check_sandbox` has already refused an id that an account has."""
    if box_identity(user):
        return Enforcement("user of the boxes", True, f"id {user}, which nobody and nothing else has")
    cost = "other processes of this user can enter boxes and change images; do: run as root, or as a user of its own"
    return Enforcement("user of the boxes", False, f"id {os.geteuid()}, that of Sparring", cost)


def _filter() -> Enforcement:
    machine = platform.machine()
    how = f"a list of allowed system calls ({machine}{', unverified' if machine != 'x86_64' else ''})"
    return Enforcement("calls into the kernel", machine in COLUMNS, how)


def _groups() -> list[Enforcement]:
    """Return the findings on the limits of control groups, by making one."""
    hierarchy = hierarchy_of_this_process()

    async def tried() -> str:
        groups = BoxGroups(hierarchy)
        try:
            return "" if groups.make(64 << 20, 0, 16) is not None else "this user may make no groups"
        except OSError as error:
            return f"a group cannot be made: {error}"
        finally:
            await groups.close()

    if not (failure := asyncio.run(tried())):
        assert hierarchy is not None
        how = f"control groups, version {hierarchy.version}{' (unverified)' if hierarchy.version == 2 else ''}"
        return [
            Enforcement("memory", True, f"{how}: 1.25 x memory_bytes + 32 MB, and the box's files"),
            Enforcement("shares of the processors", True, f"{how}: one share a box"),
        ]
    remedy = "run as root, or in a group of yours: systemd-run --user --scope -p Delegate=yes COMMAND"
    autogroup = Path("/proc/sys/kernel/sched_autogroup_enabled")
    by_session = autogroup.is_file() and autogroup.read_text().strip() == "1"
    fair = Enforcement("shares of the processors", True, "one share a session, and no new sessions in plain boxes")
    slow = "14 busy processes take the share of 14; do: sysctl -w kernel.sched_autogroup_enabled=1, or use groups"
    return [
        Enforcement(
            "memory",
            False,
            f"pages of processes, counted every 20 ms ({failure})",
            "buffers of sockets (200 KB each, 256 files a process), shared memory that nothing maps and processes "
            f"whose first thread has ended are not held: up to gigabytes a box; do: {remedy}",
        ),
        fair if by_session else Enforcement("shares of the processors", False, "one share a process", slow),
    ]


def _killer() -> Enforcement:
    text = Path("/proc/self/status").read_text()
    effective = int(text.partition("CapEff:")[2].split()[0], 16)
    if effective >> CAP_SYS_RESOURCE & 1:
        return Enforcement("out of memory", True, "the kernel kills commands first, then boxes; they cannot undo it")
    cost = "a command may give itself the score of Sparring (needs CAP_SYS_RESOURCE to prevent)"
    return Enforcement("out of memory", False, "the kernel kills commands first, as long as they let it", cost)


def _overlay(user: int) -> Enforcement:
    """Return the finding whether an overlay can be mounted in a user namespace."""
    line, program = ["unshare", "-Urm", "sh", "-c", OVERLAY], shutil.which("unshare")
    if program is None:
        return Enforcement(
            "roots of images", False, "no program unshare to try it with", "do: apt-get install util-linux"
        )
    done = subprocess.run(
        line, executable=program, capture_output=True, text=True, check=False, cwd="/", env={}, **box_identity(user)
    )
    if done.returncode == 0:
        return Enforcement("roots of images", True, "overlayfs in a user namespace (userxattr)")
    said = done.stderr.strip().splitlines()[-1:] or ["an error"]
    return Enforcement("roots of images", False, said[0], "no images and no root that can be written; needs Linux 5.11")


def _store(user: int) -> Enforcement:
    """Return the finding whether the boxes' user can read the store of images."""
    folder = store_folder(user)
    place = next(path for path in (folder / "layers", *folder.parents) if path.is_dir())
    if (closed := unreadable_part(place, user)) is not None:
        how, remedy = f"{folder}: user {user} cannot enter {closed}", f"chmod o+x {closed}, or set XDG_CACHE_HOME"
        return Enforcement("store of images", False, how, f"no images; do: {remedy}")
    if not os.access(place, os.W_OK):
        return Enforcement(
            "store of images", False, f"{folder} cannot be written", "no new images; do: set XDG_CACHE_HOME"
        )
    return Enforcement("store of images", True, str(folder))
