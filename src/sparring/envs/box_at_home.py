"""A box as an environment's code sees it, whichever thread that is on: a box belongs to the run's event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.envs.executor import at_home
from sparring.protocols import Sandbox
from sparring.types import MOST_BYTES, EntryKind, ExecResult


class BoxAtHome:
    """Box whose calls run on the run's event loop. Implements `protocols.Sandbox`; other attributes are the box's.

    Args:
        box: the box.
    """

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        """Run a command to its end, or to the end of its time."""

        async def call() -> ExecResult:
            return await self._box.exec(argv, stdin=stdin, timeout_s=timeout_s)

        return await at_home(call)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python program as the main module."""

        async def call() -> ExecResult:
            return await self._box.python(code, timeout_s=timeout_s)

        return await at_home(call)

    async def fresh(self) -> Sandbox:
        """Open another box of the same spec, in which nothing has run. The caller closes it."""
        return BoxAtHome(await at_home(self._box.fresh))

    async def converse(self, code: str, other: str) -> ExecResult:
        """Run two Python programs, each in a fresh box, joined by pipes."""
        return await at_home(self._box.converse, code, other)

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Read a file. Raises `SpoiltFile` where a command left something else in its place, or more bytes."""
        return await at_home(self._box.read, path, most_bytes)

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """List a folder. Raises `SpoiltFile` as `read` does."""
        return await at_home(self._box.entries, path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file. Raises `SpoiltFile` as `read` does."""
        return await at_home(self._box.write, path, data)

    async def close(self) -> None:
        """End the box and everything in it."""
        return await at_home(self._box.close)
