"""Linux calls that create and restrict a box: namespaces, mounts, limits.

Constants are from the kernel's headers (linux/sched.h, linux/mount.h, linux/prctl.h, linux/seccomp.h).
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import resource
import signal
import socket
import struct
from typing import Any, NamedTuple

from sparring.sandbox.inner.calls import (
    MS_NOEXEC,
    MS_NOSUID,
    MS_NOSUID_NODEV,
    MS_REC_PRIVATE,
    check_result,
    libc,
    mount,
)
from sparring.sandbox.inner.filter import CHECKED, Rules, filter_program, numbers
from sparring.sandbox.inner.root import BoxFiles

NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount, ipc, user, pid, net
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
RLIMIT_SIGPENDING = 11
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 36, 38
UID = 1000
"""The one id of the boxes in bubblewrap's namespace. A box shows it as the user of its spec."""
COUNTS = {
    "max_user_namespaces": 0,  # a command cannot enter a namespace where it is root
    "max_inotify_instances": 8,
    "max_inotify_watches": 8192,
}
"""Kernel's counts per user, which all boxes share, with the maximum for one box."""
TCP_BYTES = 64 << 10
"""Maximum bytes in a TCP socket of a box, in each direction. The kernel counts a connection that waits to be accepted
for no group, so a box counts its sockets itself (`tcp_bytes`)."""
NETWORK = {
    "core/somaxconn": "128",
    "ipv4/tcp_rmem": f"4096 {TCP_BYTES} {TCP_BYTES}",
    "ipv4/tcp_wmem": f"4096 16384 {TCP_BYTES}",
    "ipv4/tcp_max_tw_buckets": "1024",
}
"""Settings of a box's network: connections that wait at one port, buffers of TCP, connections that have ended."""
TERMINALS = 128
"""Maximum number of terminals of a box; the kernel has 4,096 for all."""
SIGNALS = 1024
"""Maximum number of queued signals and timers of a box; the kernel also counts the signals of all boxes together."""

_python = ctypes.pythonapi


def fork_isolated() -> int:
    """Fork into new user, mount, pid, ipc and network namespaces. Return 0 in the child, which is pid 1 of the new pid
    namespace."""
    number = numbers(CHECKED)["clone"]
    _python.PyOS_BeforeFork()
    pid = libc.syscall(ctypes.c_long(number), ctypes.c_ulong(NEW_NAMESPACES | signal.SIGCHLD), None, None, None, None)
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    return check_result(pid, "new namespaces for a box")


def _prctl(option: int, *arguments: object) -> None:
    check_result(libc.prctl(option, *arguments, *(0,) * (4 - len(arguments))), f"prctl {option}")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


class Furnished(NamedTuple):
    """A box that is set up: its files, the working folder of its commands, and what its filter of system calls
    allows."""

    tree: BoxFiles
    folder: str
    rules: Rules


_FILTERS = {rules: filter_program(rules) for rules in map(Rules._make, itertools.product((False, True), repeat=3))}
_HEADER, _NONE = (
    struct.pack("<Ii", 0x20080522, 0),
    bytes(24),
)  # _LINUX_CAPABILITY_VERSION_3, this process; no capability


def furnish(limits: dict[str, Any], frozen: list[int]) -> Furnished:
    """Set up new namespaces: the user, a /proc of the box, its files, and limits. Called once, as pid 1 of the box.

    The box keeps its capabilities over its own namespaces: commands without capabilities may then neither trace nor
    slow the box (capabilities(7), sched_setscheduler(2)). Commands inherit the limits and cannot undo them.

    Args:
        limits: limits and files of the box (`BoxFiles`), its `user`, the `folder` of its commands, their `variables` in
            addition to those of every box, or their whole `environment`, whether they may begin `sessions`, `doors`
            into its control group, and how many processes and open files it has itself (`own_processes`, `own_files`).
        frozen: descriptors of frozen layers (`BoxFiles`).
    """
    user = limits["user"]
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {UID} 1")
    _write("/proc/self/gid_map", f"{user} {UID} 1")
    for name, most in COUNTS.items():
        _write(f"/proc/sys/user/{name}", str(most))
    for name, text in NETWORK.items():
        _write(f"/proc/sys/net/{name}", text)
    if limits["image"] != "python":  # services of images listen at their ports, 80 or 22
        _write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
    mount(None, "/", None, MS_REC_PRIVATE)
    if os.path.isdir("/dev/pts"):
        terminals = f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}"
        mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    mount("proc", "/proc", "proc", MS_NOSUID_NODEV | MS_NOEXEC, "subset=pid")
    tree = BoxFiles(limits, frozen)
    for which, value in (
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (
            resource.RLIMIT_NPROC,
            limits["own_processes"],
        ),  # counts processes and threads of this user namespace: those of commands, their reapers and the box's pid 1
        (resource.RLIMIT_NOFILE, limits["own_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (RLIMIT_SIGPENDING, SIGNALS),
    ):
        resource.setrlimit(which, (value, value))
    _prctl(PR_SET_DUMPABLE, 0)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    os.environ.update(limits["variables"])
    if limits["environment"] is not None:
        os.environ.clear()
        os.environ.update(limits["environment"])
    rules = Rules(owners=user == 0, sizes=bool(limits["doors"]), sessions=limits["sessions"])
    return Furnished(tree, limits["folder"], rules)


def raise_loopback() -> None:
    """Enable the loopback interface of these namespaces: 127.0.0.1 and nothing else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        (flags,) = struct.unpack("16xH22x", request)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


def tcp_bytes() -> int:
    """Return an upper bound on the bytes in this box's TCP sockets: `TCP_BYTES` for each, also for those that nobody
    has accepted or that are closed and not yet empty."""
    count = 0
    for name in ("sockstat", "sockstat6"):
        try:
            with open(f"/proc/self/net/{name}", "rb") as file:
                count += sum(int(words[2]) for words in map(bytes.split, file) if words[0].startswith(b"TCP"))
        except FileNotFoundError:
            pass  # a kernel without IPv6
    return count * TCP_BYTES


def address_space_bytes() -> int:
    """Return the number of bytes that this process has mapped."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent has ended."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def narrow(address_bytes: int, cpu_s: int, processes: int, furnished: Furnished) -> None:
    """Turn this fork of the box into a command, irrevocably. A command has the box's root, limits of its own, no
    capabilities, and a filter of system calls. As long as it holds descriptors of the box, /proc keeps them from the
    box's other commands (PR_SET_DUMPABLE)."""
    furnished.tree.enter(furnished.folder)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    check_result(libc.capset(_HEADER, _NONE), "drop capabilities")
    _prctl(PR_SET_SECCOMP, 2, _FILTERS[furnished.rules][1])


def open_up() -> None:
    """Allow access to this command's /proc entries for itself and the box's other commands. The command must hold no
    descriptor of the box any more. The kernel's out-of-memory killer takes it before the box's own process."""
    _prctl(PR_SET_DUMPABLE, 1)  # without it, /proc/self would be closed to the command
    _write("/proc/self/oom_score_adj", "1000")
