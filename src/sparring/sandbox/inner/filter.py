"""System call filter of a box's commands (seccomp), by architecture.

Constants are from the kernel's headers (linux/seccomp.h, linux/filter.h, asm/unistd.h).
"""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import Any, NamedTuple


class Machine(NamedTuple):
    """System call numbers of a processor architecture: clone(2), the audit code, and the calls that are refused to
    commands.

    `memory` are calls that hold memory outside of all limits. `doors` are calls into the kernel that no tool call
    needs. prlimit64(2) is allowed only for the caller itself (pid 0): otherwise a command could limit the box's pid 1,
    which has the same user. `owners` are calls that give files or processes to other users: in a box of user 0, whose
    other ids do not exist, they answer success and do nothing, as programs that install packages expect.
    """

    clone: int
    audit: int
    memory: tuple[int, ...]  # memfd_create memfd_secret shmget msgget mq_open add_key request_key keyctl io_uring_setup
    doors: tuple[
        int, ...
    ]  # ptrace mount unshare setns bpf perf_event_open userfaultfd process_vm_readv process_vm_writev
    prlimit64: int
    owners: tuple[int, ...]  # chown fchown lchown fchownat set{u,g}id set{re,res}{u,g}id setgroups setfs{u,g}id


MACHINES = {
    "x86_64": Machine(
        clone=56,
        audit=0xC000003E,
        memory=(319, 447, 29, 68, 240, 248, 249, 250, 425),
        doors=(101, 165, 272, 308, 321, 298, 323, 310, 311),
        prlimit64=302,
        owners=(92, 93, 94, 260, 105, 106, 113, 114, 117, 119, 116, 122, 123),
    ),
    "aarch64": Machine(
        clone=220,
        audit=0xC00000B7,
        memory=(279, 447, 194, 186, 180, 217, 218, 219, 425),
        doors=(117, 40, 97, 268, 280, 241, 282, 270, 271),
        prlimit64=261,
        owners=(54, 55, 144, 146, 143, 145, 147, 149, 159, 151, 152),
    ),
}


def filter_program(pretends: bool) -> tuple[ctypes.Array[Any], bytes]:
    """Return a seccomp program (struct sock_fprog) that answers EPERM to the refused calls, and the memory that it
    points to.

    Args:
        pretends: whether calls about owners answer success without an effect.
    """
    machine = MACHINES[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    number, audit, first_argument = 0, 4, 16  # offsets in struct seccomp_data
    body: list[tuple[int, int, str | None, str | None]]
    body = [(equal, call, "refuse", None) for call in machine.memory + machine.doors]
    body += [(equal, call, "pretend", None) for call in machine.owners if pretends]
    body += [(equal, machine.prlimit64, "prlimit", None), (answer, 0x7FFF0000, None, None)]  # SECCOMP_RET_ALLOW
    head: list[tuple[int, int, str | None, str | None]]
    head = [(load, audit, None, None), (equal, machine.audit, None, "refuse")]
    head += [(load, number, None, None), (at_least, 0x40000000, "refuse", None)]  # the x32 numbering
    steps = (
        head + body + [(load, first_argument, None, None), (equal, 0, None, "refuse"), (answer, 0x7FFF0000, None, None)]
    )
    steps += [(answer, 0x00050000, None, None)]  # SECCOMP_RET_ERRNO without an error: success
    steps += [(answer, 0x00050000 | 1, None, None)]  # SECCOMP_RET_ERRNO | EPERM
    labels = {"prlimit": len(head + body), "pretend": len(steps) - 2, "refuse": len(steps) - 1}
    code = b""
    for here, (operation, value, then, otherwise) in enumerate(steps):
        jumps = [0 if label is None else labels[label] - here - 1 for label in (then, otherwise)]
        code += struct.pack("<HBBI", operation, *jumps, value)
    memory = ctypes.create_string_buffer(code)
    return memory, struct.pack("HxxxxxxP", len(steps), ctypes.addressof(memory))
