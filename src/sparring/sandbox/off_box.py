"""The box of a tool host that is switched off."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from sparring.protocols import Sandbox
from sparring.types import MOST_BYTES, EntryKind, ExecResult


class OffBox:
    """Implements `Sandbox` for a tool host that is switched off: every command fails with a text and none with an
    exception."""

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        """Exit code 1 and an error text."""
        return ExecResult(exit_code=1, stdout="", stderr="error: the tool host is switched off\n", wall_s=0.0)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Exit code 1 and an error text."""
        return await self.exec(())

    async def fresh(self) -> Sandbox:
        """Return another that is off."""
        return OffBox()

    async def converse(self, code: str, other: str) -> ExecResult:
        """Exit code 1 and an error text."""
        return await self.exec(())

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Raise FileNotFoundError: no file exists.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(errno.ENOENT, "the tool host is switched off", path)

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """Return nothing: no file exists."""
        return {}

    async def write(self, path: str, data: bytes) -> None:
        """Drop the file: nothing is kept."""

    async def close(self) -> None:
        """Do nothing: there is nothing to end."""
