"""Linux calls that create and restrict a box: namespaces, mounts, limits.

Constants are from the kernel's headers (linux/sched.h, linux/mount.h, linux/prctl.h, linux/seccomp.h).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import struct

from sparring.sandbox.inner.filter import MACHINES, filter_program

NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount, ipc, user, pid, net
MS_NOSUID, MS_NOSUID_NODEV, MS_NOEXEC, MS_BIND, MS_REC_PRIVATE = 0x2, 0x2 | 0x4, 0x8, 0x1000, 0x4000 | 0x40000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 36, 38
UID = 1000

# PyDLL keeps the interpreter's lock: no other Python code may run between a fork and its bookkeeping.
_libc = ctypes.PyDLL(None, use_errno=True)
_python = ctypes.pythonapi


def _check_result(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def fork_isolated() -> int:
    """Fork into new user, mount, pid, ipc and network namespaces. Return 0 in the child, which is pid 1 of the new pid
    namespace."""
    number = MACHINES[platform.machine()].clone
    _python.PyOS_BeforeFork()
    pid = _libc.syscall(ctypes.c_long(number), ctypes.c_ulong(NEW_NAMESPACES | signal.SIGCHLD), None, None, None, None)
    if pid == 0:
        _python.PyOS_AfterFork_Child()
    else:
        _python.PyOS_AfterFork_Parent()
    return _check_result(pid, "new namespaces for a box")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _check_result(_libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {target}")


def _prctl(option: int, *arguments: object) -> None:
    _check_result(_libc.prctl(option, *arguments, *(0,) * (4 - len(arguments))), f"prctl {option}")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


_FILTER = filter_program()
_HEADER, _NONE = (
    struct.pack("<Ii", 0x20080522, 0),
    bytes(24),
)  # _LINUX_CAPABILITY_VERSION_3, this process; no capability


def furnish(disk_bytes: int, processes: int, files: int) -> None:
    """Set up new namespaces: the user, private folders, a /proc of the box, and limits. Called once, as pid 1 of the
    box.

    The box keeps its capabilities over its own namespaces: commands without capabilities may then neither trace nor
    slow the box (capabilities(7), sched_setscheduler(2)). Commands inherit these settings and cannot undo them. One
    tmpfs holds /box, /tmp and /dev/shm, so that `disk_bytes` limits everything that a box writes; it stays visible
    under /mnt, because an unmount waits milliseconds for the kernel.
    """
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{UID} {UID} 1")
    _write("/proc/self/gid_map", f"{UID} {UID} 1")
    _write("/proc/sys/user/max_user_namespaces", "0")  # a command cannot enter a namespace where it is root
    _mount(None, "/", None, MS_REC_PRIVATE)
    _mount(
        "box", "/mnt", "tmpfs", MS_NOSUID_NODEV, f"size={disk_bytes},nr_inodes={max(256, disk_bytes >> 12)},mode=0700"
    )
    homes = [("agent", "/agent")] if os.path.isdir("/agent") else []  # home of programs
    for inner, target in (*homes, ("box", "/box"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"/mnt/{inner}", 0o700)
        _mount(f"/mnt/{inner}", target, None, MS_BIND)
    if os.path.isdir("/dev/pts"):
        _mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    _mount("proc", "/proc", "proc", MS_NOSUID_NODEV | MS_NOEXEC, "subset=pid")
    os.chdir("/box")
    for which, value in (
        (resource.RLIMIT_FSIZE, disk_bytes),
        (
            resource.RLIMIT_NPROC,
            processes + 1,
        ),  # counts processes and threads of this user namespace: the command's and the box's pid 1
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(which, (value, value))
    _prctl(PR_SET_DUMPABLE, 0)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    _prctl(PR_SET_SECCOMP, 2, _FILTER[1])


def raise_loopback() -> None:
    """Enable the loopback interface of these namespaces: 127.0.0.1 and nothing else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        (flags,) = struct.unpack("16xH22x", request)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


def address_space_bytes() -> int:
    """Return the number of bytes that this process has mapped."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def become_subreaper() -> None:
    """Keep what a descendant of this process leaves behind below this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def narrow(address_bytes: int, cpu_s: int, processes: int, files: int) -> None:
    """Turn this fork of the box into a command, irrevocably. A command has limits of its own and no capabilities."""
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    _check_result(_libc.capset(_HEADER, _NONE), "drop capabilities")
    _prctl(PR_SET_DUMPABLE, 1)  # without it, /proc/self would be closed to the command
