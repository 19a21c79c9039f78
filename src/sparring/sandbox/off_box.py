"""`OffBox`: the box of a disabled sandbox."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from typing import Unpack

from sparring.protocols import Command, LiveProcess, Sandbox, Shell, Snapshot, Terminal
from sparring.sandbox.fault import spoilt
from sparring.sandbox.roots import Root
from sparring.sandbox.snapshots import LayeredSnapshot
from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult, TreeEntry


class OffCommand:
    """Command of a box that is off: it has failed before it began. Implements `LiveProcess`, `Shell` and `Terminal`."""

    ended = True

    async def output(self) -> ExecResult:
        return await OffBox().exec(())

    async def write(self, data: bytes | str, *, ends: bool = False) -> None:
        """Drop the data."""

    async def run(self, text: str, *, timeout_s: float | None = None, output_bytes: int | None = None) -> ExecResult:
        """Return the error."""
        return await self.output()

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        return await self.output()

    async def kill(self) -> ExecResult:
        return await self.output()

    def screen(self) -> str:
        """Return the error's text."""
        return "error: the tool host is switched off"

    async def type(self, data: str | bytes) -> None:
        """Drop the data."""

    async def shows(self, text: str, timeout_s: float) -> bool:
        """Return at once."""
        return text in self.screen()

    async def quiet(self, quiet_s: float, timeout_s: float) -> None:
        """Return at once."""

    async def resize(self, columns: int, rows: int) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class OffBox:
    """Box in which every command fails with an error text and exit code 1, without an exception. A file that it lacks
    is one that the policy did not write. Implements `Sandbox`."""

    async def exec(self, argv: Sequence[str] | str, **command: Unpack[Command]) -> ExecResult:
        return ExecResult(exit_code=1, stdout="", stderr="error: the tool host is switched off\n", wall_s=0.0)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        return await self.exec(())

    async def start(self, argv: Sequence[str] | str, **named: object) -> LiveProcess:
        return OffCommand()

    async def shell(self, **named: object) -> Shell:
        return OffCommand()

    async def terminal(self, argv: Sequence[str] | str, **named: object) -> Terminal:
        return OffCommand()

    async def connect(self, port: int) -> socket.socket:
        raise spoilt(ConnectionRefusedError(errno.ECONNREFUSED, "the tool host is switched off"))

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        """Drop the tree."""

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        raise spoilt(FileNotFoundError(errno.ENOENT, "the tool host is switched off", path))

    async def fresh(self) -> Sandbox:
        return OffBox()

    async def converse(self, code: str, other: str) -> ExecResult:
        return await self.exec(())

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        raise spoilt(FileNotFoundError(errno.ENOENT, "the tool host is switched off", path))

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        return {}

    async def write(self, path: str, data: bytes) -> None:
        """Drop the data."""

    async def snapshot(self, *, ends: bool = False) -> Snapshot:
        return LayeredSnapshot(spec=BoxSpec(), root=Root())

    async def fork(self, snapshot: Snapshot) -> Sandbox:
        return OffBox()

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        return OffBox()

    async def close(self) -> None:
        """Do nothing."""
