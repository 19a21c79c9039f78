"""Boxes: their specification in a task, and the results of their commands and files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sparring.errors import refusal

LEAST_S = 0.001
MOST_SPEC_S, MOST_SPEC_BYTES, MOST_PROCESSES = 1e6, 1 << 50, 1 << 22
"""Limits that no machine needs to exceed: eleven days, a pebibyte, the kernel's number of processes."""
MOST_USER = 65535


def check_seconds(where: str, value: object, least: float, most: float) -> None:
    """Refuse an invalid time limit.

    Raises:
        BadInput: `value` is not a number from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        expected = f"{least:g} seconds or more" if most == math.inf else f"seconds, from {least:g} to {most:.0f}"
        raise refusal(where, expected, repr(value), "write a number")


def check_count(where: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Refuse a value that is not a whole number from `least` to `most`.

    Raises:
        BadInput: `value` is something else.
    """
    if type(value) is not int or not least <= value <= most:
        expected = f"a whole number of {least} or more" if most == math.inf else f"{least} to {most}"
        raise refusal(where, expected, repr(value), "write such a number")


def check_user(user: object) -> None:
    """Refuse an invalid user id.

    Raises:
        BadInput: `user` is not a number from 0 to 65535.
    """
    if type(user) is not int or not 0 <= user <= MOST_USER:
        remedy = "write a number: 0 for images whose programs install things, else 1000"
        raise refusal("box.user", f"a number from 0 to {MOST_USER}", repr(user), remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """`[env.box]`: the box in which the policy's commands run. Times and sizes are per command.

    Raises:
        BadInput: a limit is not a number, or is larger than any machine can provide.
    """

    image: str = "python"
    """Programs in the box. `python`: the host's programs, read-only; `host`: the same with a writable root; else the
    name of an image that `sparring image pull` unpacked."""

    user: int = 1000
    """Id that the box's one user has inside, 0 to 65535. For user 0, system calls that give files or processes to other
    users return success and do nothing."""

    timeout_s: float = 2.0
    """Maximum wall-clock time of a command, in seconds."""

    memory_bytes: int = 256 << 20
    """Maximum memory of a command."""

    disk_bytes: int = 16 << 20
    """Maximum size of all files in the box."""

    output_bytes: int = 4096
    """Bytes of a command's output that are kept."""

    processes: int = 16
    """Maximum number of processes and threads at one time."""

    network: bool = False
    """Allow access to the network from inside the box."""

    def __post_init__(self) -> None:
        if not isinstance(self.image, str):
            raise refusal("box.image", "a text", repr(self.image), "write the name of an image")
        check_user(self.user)
        check_seconds("box.timeout_s", self.timeout_s, LEAST_S, MOST_SPEC_S)
        for name in ("memory_bytes", "disk_bytes", "output_bytes"):
            check_count(f"box.{name}", getattr(self, name), 1, MOST_SPEC_BYTES)
        check_count("box.processes", self.processes, 1, MOST_PROCESSES)


EntryKind = Literal["file", "folder", "link", "other"]
"""Kinds of entries in a box's folder; other: a pipe, a socket, a device."""

MOST_BYTES = 16 << 20
"""Default limit on the bytes read from a box's file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeEntry:
    """File, folder or link of a tree, by its path in it.

    Attributes:
        kind: kind of the entry; the content of kind `other` (a pipe, a socket, a device) is not carried.
        data: content of a file.
        executable: whether its owner may run it.
        target: where a link leads.
    """

    kind: EntryKind = "file"
    data: bytes = b""
    executable: bool = False
    target: str = ""


CommandEnd = Literal["exited", "signalled", "timed out", "out of memory", "out of disk", "killed", "lost", "running"]
"""How a command ended. "out of disk": it failed while the disk was full; "killed": by its caller, or because its reaper
was killed; "lost": its box ended; "running": it has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """Result of a command. A limit that was hit is the doing of the policy's command, not a failure.

    Attributes:
        exit_code: the command's status; 128 + n after signal n; 137 if the box killed the command; -1 while it runs.
        stdout: standard output. Of a long output, head and tail are kept, with a line between them that counts the
            missing bytes.
        stderr: standard error, likewise.
        wall_s: seconds from the command's start to its end.
        timed_out: whether `end` is "timed out".
        out_of_memory: whether `end` is "out of memory".
        truncated: whether bytes are missing.
        end: how the command ended, by what the box saw.
        missing_bytes: number of bytes that are missing from both streams.
    """

    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False
    end: CommandEnd = "exited"
    missing_bytes: int = 0
