"""`OffBox`: the box of a disabled sandbox."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from sparring.protocols import Snapshot
from sparring.sandbox.fault import spoilt
from sparring.sandbox.roots import Root
from sparring.sandbox.snapshots import LayeredSnapshot
from sparring.types import BoxSpec, EntryKind, ExecResult, TreeEntry

OFF = "the tool host is switched off"


async def failed(*arguments: object, **named: object) -> ExecResult:
    """Return the result of every command."""
    return ExecResult(exit_code=1, stdout="", stderr=f"error: {OFF}\n", wall_s=0.0)


async def nothing(*arguments: object, **named: object) -> None:
    """Do nothing."""


class OffCommand:
    """Command of a box that is off: it has failed before it began. Implements `LiveProcess`, `Shell` and `Terminal`."""

    ended = True
    output = run = wait = kill = staticmethod(failed)
    write = type = quiet = resize = close = staticmethod(nothing)

    def screen(self) -> str:
        """Return the error's text."""
        return f"error: {OFF}"

    async def shows(self, text: str, timeout_s: float) -> bool:
        """Return at once whether the error's text contains `text`."""
        return text in self.screen()


class OffBox:
    """Box in which every command fails with an error text and exit code 1, without an exception. Reading a file is the
    policy's failure: no command has written it. Implements `Sandbox`."""

    exec = python = converse = staticmethod(failed)
    write = upload = close = staticmethod(nothing)

    async def start(self, *arguments: object, **named: object) -> OffCommand:
        return OffCommand()

    shell = terminal = start

    async def fresh(self, *arguments: object, **named: object) -> OffBox:
        return self

    fork = verifier = fresh

    async def connect(self, port: int) -> socket.socket:
        raise spoilt(ConnectionRefusedError(errno.ECONNREFUSED, OFF))

    async def read(self, path: str, most_bytes: int = 0) -> bytes:
        raise spoilt(FileNotFoundError(errno.ENOENT, OFF, path))

    async def download(self, path: str = ".", most_bytes: int = 0) -> Mapping[str, TreeEntry]:
        raise spoilt(FileNotFoundError(errno.ENOENT, OFF, path))

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        return {}

    async def snapshot(self, *, ends: bool = False) -> Snapshot:
        return LayeredSnapshot(spec=BoxSpec(), root=Root())
