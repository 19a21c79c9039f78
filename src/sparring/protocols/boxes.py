"""Protocols of boxes: commands, long-running processes, shells and terminals, snapshots, and the pool."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypedDict, Unpack, runtime_checkable

from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult, TreeEntry

OnOutput = Callable[[str, bytes], Awaitable[None]]
"""Function that gets the output of a running command: "stdout" or "stderr", and a piece. The command waits for it."""


class Placement(TypedDict, total=False):
    """Where a command runs."""

    cwd: str | None
    """Working folder of the command; by default the box's working folder."""

    environment: Mapping[str, str] | None
    """Environment variables, in addition to those of the box."""


class LiveCommand(Placement, total=False):
    """Where a command runs, for how long, and who gets its output."""

    timeout_s: float | None
    """Seconds after which the command is killed; by default the box's limit for `exec`, and no limit for `start`."""

    output_bytes: int | None
    """Maximum number of bytes that are kept of each stream; by default the box's limit."""

    on_output: OnOutput | None
    """Function that gets all output while the command runs."""


class Command(LiveCommand, total=False):
    """How a command runs, in addition to its program and arguments."""

    stdin: str | bytes
    """Standard input."""


class LiveProcess(Protocol):
    """Program that runs in a box at the same time as others, until it ends or is killed.

    Raises:
        SandboxError: the box itself failed.
    """

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""

    async def output(self) -> ExecResult:
        """Return head and tail of the program's output so far; `end` is "running" while the program runs."""

    async def write(self, data: bytes | str, *, ends: bool = False) -> None:
        """Write to the program's standard input as fast as the program reads; `ends` closes the input afterwards.

        Raises:
            SpoiltFile: the program reads nothing within the box's `timeout_s`; the error is also a TimeoutError.
        """

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Return the program's result when it has ended, or its output so far after `timeout_s` seconds.

        Raises:
            Exception: `on_output` raised this exception, which ended the program.
        """

    async def kill(self) -> ExecResult:
        """End the program with all that it started, and return its result."""

    async def close(self) -> None:
        """End the program with all that it started."""


class Shell(Protocol):
    """Shell that runs one text after another, and keeps its folder, variables, functions and jobs.

    Raises:
        SandboxError: the box itself failed.
    """

    @property
    def ended(self) -> bool:
        """Whether the shell has ended: a text called `exit`, or could not be interrupted."""

    async def run(self, text: str, *, timeout_s: float | None = None, output_bytes: int | None = None) -> ExecResult:
        """Run a text. At the time limit the text is interrupted, with all that it started. The shell and older jobs
        then go on. If the text cannot be interrupted, the shell ends.

        Raises:
            PolicyFailure: the shell has ended before.
        """

    async def close(self) -> None:
        """End the shell with its jobs."""


class Terminal(Protocol):
    """Program with a terminal.

    Raises:
        SandboxError: the box itself failed.
    """

    @property
    def ended(self) -> bool:
        """Whether the program has ended."""

    def screen(self) -> str:
        """Return the text of the screen, without spaces at the ends of lines and without empty lines at its end."""

    async def type(self, data: str | bytes) -> None:
        """Type on the keyboard; "\\r" is the enter key, "\\x03" control and C.

        Raises:
            SpoiltFile: as `LiveProcess.write`.
        """

    async def shows(self, text: str, timeout_s: float) -> bool:
        """Wait until the screen shows a text, the program ends, or `timeout_s` seconds have passed. Return whether the
        screen shows the text."""

    async def quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Wait until the screen has not changed for `quiet_s` seconds, the program ends, or `timeout_s` seconds have
        passed."""

    async def resize(self, columns: int, rows: int) -> None:
        """Change the size; the program gets SIGWINCH.

        Raises:
            BadInput: no terminal can have this size.
        """

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """Return the program's result when it has ended, or None after `timeout_s` seconds."""

    async def close(self) -> None:
        """End the program with all that it started."""


class Snapshot(Protocol):
    """State of a box, from which other boxes can be forked. The state is kept as long as an object refers to it."""

    @property
    def folder(self) -> str:
        """Working folder of commands."""

    @property
    def environment(self) -> Mapping[str, str] | None:
        """Environment of commands; None: the default environment of boxes."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Command lines of the processes that ran in the box. Processes are not part of the state."""


class Sandbox(Protocol):
    """Isolated box in which commands run. Relative paths start at its working folder. The caller who gets a box closes
    it.

    Raises:
        SandboxError: the box itself failed; not raised for anything that a program inside does.
        OSError: a file, a folder or a port cannot be used; the class is that of the errno. The policy may be the cause
            once a command has run in the box, or its world is open: then the error is also a `SpoiltFile`, which is a
            `PolicyFailure`.
    """

    async def exec(self, argv: Sequence[str] | str, **command: Unpack[Command]) -> ExecResult:
        """Run a program with its arguments, or a text of sh, until it ends or reaches its time limit. Processes that it
        leaves are ended too. Exit codes are those of a shell: 126, 127, or 128 + n after signal n.

        Raises:
            FileNotFoundError: the folder `cwd` does not exist.
            NotADirectoryError: `cwd` is not a folder.
        """

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python program as `python3 -c` would. In a box of an image, the image's `python3` runs it."""

    async def start(self, argv: Sequence[str] | str, **bounds: Unpack[LiveCommand]) -> LiveProcess:
        """Start a command that runs at the same time as others, until it ends or is killed. All else is as for `exec`.
        From then on the box has a loopback interface."""

    async def shell(self, **placement: Unpack[Placement]) -> Shell:
        """Start a shell: bash if the box has it.

        Raises:
            PolicyFailure: a command of the box killed the shell, or broke files that the shell needs.
        """

    async def terminal(
        self, argv: Sequence[str] | str, *, columns: int = 80, rows: int = 24, **placement: Unpack[Placement]
    ) -> Terminal:
        """Start a command with a terminal.

        Raises:
            BadInput: no terminal can have this size, or the package that reads screens is missing.
        """

    async def connect(self, port: int) -> socket.socket:
        """Connect to a port at which a command of the box listens, on 127.0.0.1. The caller closes the socket, whose
        timeout is the box's `timeout_s` at first. A connection that the command breaks is the policy's failure.

        Raises:
            BadInput: the port number is invalid.
            ConnectionRefusedError: nothing listens at the port.
            TimeoutError: the program at the port accepts no connection.
        """

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        """Write a tree, given by relative paths, below a folder, which is created. A replaced file keeps its mode if
        the new one is not executable. No file is visible before it is complete.

        Raises:
            BadInput: a path leads out of the tree.
            SpoiltFile: the tree has a pipe, a socket or a device, which cannot be written.
        """

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        """Return the tree below a folder by relative paths, without following links. More than `most_bytes`, names
        included, are refused. Of `/proc` and read-only mounts in the tree, only the folder itself is returned."""

    async def fresh(self) -> Sandbox:
        """Open another, unused box of the same spec."""

    async def converse(self, code: str, other: str) -> ExecResult:
        """Run two Python programs at once, each in a fresh box and connected by pipes, and return the result of `code`.

        A program writes to file descriptor 201 and reads from 200. `other` has the box's time limit, `code` twice as
        much; when `code` ends, `other` is ended too. Together they take one slot of the pool, since one usually waits.

        Raises:
            BadInput: the box's image has no Python.
        """

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Read a regular file of at most `most_bytes`, without waiting for a pipe."""

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """List the entries of a folder with their kinds, without following links or running a program in the box. Names
        that are not UTF-8 are as in `os.listdir`."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and create its folders. The old content stays until the new one is complete, and after a
        failure."""

    async def snapshot(self, *, ends: bool = False) -> Snapshot:
        """Return a snapshot of the box's files, working folder and environment. Its cost does not grow with their size.

        The call waits for running commands; no command begins meanwhile. Verifiers of a box are forks of its first
        snapshot. So a world makes one when it has prepared the box, before the policy's first command.

        Args:
            ends: end the processes that still run in the box. The snapshot has only their command lines.

        Raises:
            BadInput: processes of a program, `start`, a shell or a terminal still run, without `ends`; or the box has
                too many snapshots on top of each other.
        """

    async def fork(self, snapshot: Snapshot) -> Sandbox:
        """Open another box in the state of a snapshot. The snapshot's own box may be closed.

        Raises:
            BadInput: the snapshot is from another kind of pool.
        """

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        """Open a box in which the policy's work can be judged: a fork of the snapshot after `Env.prepare`, or else of
        the first snapshot, with the files `paths` of this box copied into it.

        In the new box, `converse` runs `code` without these files and `other` with them.

        Args:
            paths: regular files. A file that is missing in this box is removed in the new box.
            most_bytes: maximum size of each file.

        Raises:
            SpoiltFile: a command left a larger file at a path, no regular file, or a link on the way to it.
            BadInput: a path is invalid; or commands have run in the box, and no snapshot was made before.
        """

    async def close(self) -> None:
        """End the box with all its processes."""


@runtime_checkable
class HandedOver(Protocol):
    """Box that distinguishes errors that the policy may have caused from errors of its world."""

    def hand_over(self) -> None:
        """Note that from now on the policy may be the cause of errors."""


class Boxes(Protocol):
    """Pool of boxes, which opens every box of a run."""

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Open a box of this spec, waiting until one is free."""

    async def close(self) -> None:
        """End every box."""
