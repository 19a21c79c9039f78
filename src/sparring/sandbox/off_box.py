"""`OffBox`: the box of a disabled sandbox."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from sparring.protocols import Sandbox, Snapshot
from sparring.sandbox.snapshots import LayeredSnapshot
from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult


class OffBox:
    """Box in which every command fails with an error text and exit code 1, without an exception. Implements
    `Sandbox`."""

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        return ExecResult(exit_code=1, stdout="", stderr="error: the tool host is switched off\n", wall_s=0.0)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        return await self.exec(())

    async def fresh(self) -> Sandbox:
        return OffBox()

    async def converse(self, code: str, other: str) -> ExecResult:
        return await self.exec(())

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "the tool host is switched off", path)

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        return {}

    async def write(self, path: str, data: bytes) -> None:
        """Drop the data."""

    async def snapshot(self) -> Snapshot:
        return LayeredSnapshot(spec=BoxSpec(), layers=())

    async def fork(self, snapshot: Snapshot) -> Sandbox:
        return OffBox()

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        return OffBox()

    async def close(self) -> None:
        """Do nothing."""
