"""Protocols of boxes: commands, what lives on in a box, and the pool."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypedDict, Unpack, runtime_checkable

from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult, TreeEntry

OnOutput = Callable[[str, bytes], Awaitable[None]]
"""Taker of a command's output while it runs: "stdout" or "stderr", and a piece. The command waits for a slow one."""


class Placement(TypedDict, total=False):
    """Where a command runs."""

    cwd: str | None
    """Folder of the box; by default the box's own."""

    environment: Mapping[str, str] | None
    """Variables besides the box's own."""


class LiveCommand(Placement, total=False):
    """Where a command runs, for how long, and who gets its output."""

    timeout_s: float | None
    """Seconds until it is ended; by default the box's limit, and none for what lives on."""

    output_bytes: int | None
    """Most bytes that are kept of each stream; by default the box's limit."""

    on_output: OnOutput | None
    """Gets all output while the command runs."""


class Command(LiveCommand, total=False):
    """How a command runs, besides its program and arguments."""

    stdin: str | bytes
    """Standard input."""


class LiveProcess(Protocol):
    """Program that runs beside others in a box, until it ends or is killed.

    Raises:
        SandboxError: the box itself failed.
    """

    @property
    def ended(self) -> bool:
        """Whether it has ended."""

    async def output(self) -> ExecResult:
        """Return head and tail of what it has written so far; `end` is "running" while it runs."""

    async def write(self, data: bytes | str, *, ends: bool = False) -> None:
        """Write to its standard input as fast as it reads; `ends` closes it.

        Raises:
            SpoiltFile: it reads nothing for as long as a command of the box may take (TimeoutError).
        """

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Return its result when it has ended, or its output so far after `timeout_s` seconds.

        Raises:
            Exception: exception of `on_output`, which has ended it.
        """

    async def kill(self) -> ExecResult:
        """End it with all that it started, and return its result."""

    async def close(self) -> None:
        """End it with all that it started."""


class Shell(Protocol):
    """Shell whose folder, variables, functions and jobs live on from text to text.

    Raises:
        SandboxError: the box itself failed.
    """

    @property
    def ended(self) -> bool:
        """Whether it has ended: a text said exit, or did not let itself be interrupted."""

    async def run(self, text: str, *, timeout_s: float | None = None, output_bytes: int | None = None) -> ExecResult:
        """Run a text. At its time limit it is interrupted, with all that it started; the shell and what ran before live
        on if it lets itself be interrupted, else the shell has ended.

        Raises:
            PolicyFailure: the shell has ended before.
        """

    async def close(self) -> None:
        """End it with its jobs."""


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
        """Wait until the screen shows a text, at most `timeout_s` seconds or until the program ends; return whether it
        does."""

    async def quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Wait until nothing has changed for `quiet_s` seconds, at most `timeout_s` seconds or until the program
        ends."""

    async def resize(self, columns: int, rows: int) -> None:
        """Change the size; the program gets SIGWINCH.

        Raises:
            BadInput: a size that no terminal has.
        """

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """Return the program's result when it has ended, or None after `timeout_s` seconds."""

    async def close(self) -> None:
        """End the program with all that it started."""


class Snapshot(Protocol):
    """State of a box, of which boxes can be forked. It is held as long as something refers to it."""

    @property
    def folder(self) -> str:
        """Working folder of commands."""

    @property
    def environment(self) -> Mapping[str, str] | None:
        """Environment of commands; None: that of every box."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Command lines of the processes that ran, which are not part of the state."""


class Sandbox(Protocol):
    """Isolated box in which commands run. Relative paths start at its working folder. Whoever gets a box closes it.

    Raises:
        SandboxError: the box itself failed; not raised for anything that a program inside does.
        OSError: error of a file, a folder or a port, of the class of its number, such as `FileNotFoundError`. Once a
            command has run in the box, or its world is open, the policy may be the reason: then it is a `SpoiltFile`
            too, which is a `PolicyFailure`.
    """

    async def exec(self, argv: Sequence[str] | str, **command: Unpack[Command]) -> ExecResult:
        """Run a program with its arguments, or a text of sh, until it ends or its time is up, and end with it all that
        it left running. The exit code is a shell's: 126, 127, or 128 + n after signal n.

        Raises:
            FileNotFoundError: there is no folder `cwd`.
            NotADirectoryError: something else is at `cwd`.
        """

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python program as `python3 -c` would; in a box of an image by the image's `python3`."""

    async def start(self, argv: Sequence[str] | str, **bounds: Unpack[LiveCommand]) -> LiveProcess:
        """Start a command that runs beside others until it ends or is killed; the rest as `exec`. From then on the box
        has its loopback interface."""

    async def shell(self, **placement: Unpack[Placement]) -> Shell:
        """Start a shell that lives on: bash where the box has it.

        Raises:
            PolicyFailure: a command has ended it, or spoilt what it needs.
        """

    async def terminal(
        self, argv: Sequence[str] | str, *, columns: int = 80, rows: int = 24, **placement: Unpack[Placement]
    ) -> Terminal:
        """Start a command with a terminal.

        Raises:
            BadInput: a size that no terminal has, or the package that reads screens is missing.
        """

    async def connect(self, port: int) -> socket.socket:
        """Connect to a port of the box that a command listens at, on 127.0.0.1. The caller closes the socket, which has
        the box's time limit until the caller gives it another. What the command breaks off is the policy's failure.

        Raises:
            BadInput: no such port can be.
            ConnectionRefusedError: nothing listens there.
            TimeoutError: what listens there takes no connection.
        """

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        """Write a tree, by the paths in it, below a folder, which is made. A file that was there keeps its mode if the
        new one is not executable; each file appears whole.

        Raises:
            BadInput: a path that leads out of the tree.
            SpoiltFile: the tree has what cannot be carried: a pipe, a socket, a device.
        """

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        """Read the tree below a folder, by the paths in it, without following links: at most `most_bytes`, with the
        names. Of `/proc`, and of what is shown read-only in the tree, only the folder's name is there."""

    async def fresh(self) -> Sandbox:
        """Open another, unused box of the same spec."""

    async def converse(self, code: str, other: str) -> ExecResult:
        """Run two Python programs at once, each in a fresh box and connected by pipes, and return the result of `code`.

        A program writes to file descriptor 201 and reads from 200. `other` has the box's time limit, `code` twice as
        much; when `code` ends, `other` is ended too. Together they take one slot of the pool, since one usually waits.

        Raises:
            BadInput: the box has an image of its own, which has no Python.
        """

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Read a regular file of at most `most_bytes`, without waiting for a pipe."""

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """List the entries of a folder with their kinds, without following links or running a program in the box. Names
        that are not UTF-8 are as in `os.listdir`."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and make its folders. It appears once it is complete; until then, and after a failure, the old
        content stays."""

    async def snapshot(self, *, ends: bool = False) -> Snapshot:
        """Keep the box's files, working folder and environment as they are now, at no cost that grows with them.

        It waits for commands that run, and none begins meanwhile. The first snapshot of a box is what its verifiers are
        forks of: a world makes it when it has prepared the box, before the policy's first command.

        Args:
            ends: end the processes that live on in the box. They are not part of the state, which names them.

        Raises:
            BadInput: processes live on, which a program, `start`, a shell or a terminal left; or the box has too many
                snapshots on top of each other.
        """

    async def fork(self, snapshot: Snapshot) -> Sandbox:
        """Open another box in the state of a snapshot, whose box may be closed.

        Raises:
            BadInput: a snapshot of another pool's kind.
        """

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        """Open a box in which the policy's work can be judged: a fork of what `Env.prepare` left, else of the first
        snapshot, into which only files of these names come.

        In it, `converse` runs `code` without these files and `other` with them.

        Args:
            paths: regular files. One that is missing in this box is missing there.
            most_bytes: maximum size of each.

        Raises:
            SpoiltFile: a command left something else at a path, a link on the way to it, or a larger file.
            BadInput: a path is none; or commands have run, and no snapshot was made before.
        """

    async def close(self) -> None:
        """End the box with all its processes."""


@runtime_checkable
class HandedOver(Protocol):
    """Box that tells what the policy spoilt from what its world asks for in vain."""

    def hand_over(self) -> None:
        """Note that the policy acts from now on."""


class Boxes(Protocol):
    """Pool of boxes, which opens every box of a run."""

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Open a box of this spec, waiting until one is free."""

    async def close(self) -> None:
        """End every box."""
