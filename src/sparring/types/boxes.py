"""Boxes: what a task needs of one, and what comes out of it."""

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
    """Refuse a time limit that is none.

    Raises:
        BadInput: it is not a number from `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        expected = f"{least:g} seconds or more" if most == math.inf else f"seconds, from {least:g} to {most:.0f}"
        raise refusal(where, expected, repr(value), "write a number")


def check_count(where: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Refuse what is no whole number of this range.

    Raises:
        BadInput: it is something else.
    """
    if type(value) is not int or not least <= value <= most:
        expected = f"a whole number of {least} or more" if most == math.inf else f"{least} to {most}"
        raise refusal(where, expected, repr(value), "write such a number")


def check_user(user: object) -> None:
    """Refuse a user that is no id.

    Raises:
        BadInput: it is not a number from 0 to 65535.
    """
    if type(user) is not int or not 0 <= user <= MOST_USER:
        remedy = "write a number: 0 for images whose programs install things, else 1000"
        raise refusal("box.user", f"a number from 0 to {MOST_USER}", repr(user), remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """`[env.box]`: the box in which the policy's commands run. Times and sizes are per command.

    Raises:
        BadInput: a limit is no number, or one that no machine can hold.
    """

    image: str = "python"
    """What is installed: `python`, the host's programs, of which nothing can be written; `host`, the same with a root
    that can be written; or the name of an image that `sparring image pull` unpacked."""

    user: int = 1000
    """Id that the box's one user has inside, 0 to 65535. As 0, calls that give files or processes to other users answer
    success and do nothing."""

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
        kind: what it is; the bytes of what is neither (a pipe, a socket) are not carried.
        data: content of a file.
        executable: whether its owner may run it.
        target: where a link leads.
    """

    kind: EntryKind = "file"
    data: bytes = b""
    executable: bool = False
    target: str = ""


CommandEnd = Literal["exited", "signalled", "timed out", "out of memory", "out of disk", "killed", "lost", "running"]
"""How a command ended. Out of disk: it failed while nothing more could be written; killed: by its caller, or with what
holds it together; lost: its box ended; running: it has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """Result of a command. Limits are the policy's command's doing, not failures.

    Attributes:
        exit_code: the command's status; 128 + n after signal n; 137 if the box ended it; -1 while it runs.
        stdout: standard output, of which a long one keeps head and tail, with a line between that counts what is
            missing.
        stderr: standard error, likewise.
        wall_s: seconds from its start to its end.
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
