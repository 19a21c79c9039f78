"""`BoxAtHome`: a box that code on an environment's own thread can call, although it belongs to the run's event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.envs.executor import at_home
from sparring.protocols import Sandbox, Snapshot
from sparring.types import MOST_BYTES, EntryKind, ExecResult


class BoxAtHome:
    """Box that forwards calls to the run's event loop. Implements `protocols.Sandbox`; other attributes are the box's
    own."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        return await at_home(self._box.exec, argv, stdin=stdin, timeout_s=timeout_s)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        return await at_home(self._box.python, code, timeout_s=timeout_s)

    async def fresh(self) -> Sandbox:
        return BoxAtHome(await at_home(self._box.fresh))

    async def converse(self, code: str, other: str) -> ExecResult:
        return await at_home(self._box.converse, code, other)

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        return await at_home(self._box.read, path, most_bytes)

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        return await at_home(self._box.entries, path)

    async def write(self, path: str, data: bytes) -> None:
        return await at_home(self._box.write, path, data)

    async def snapshot(self) -> Snapshot:
        return await at_home(self._box.snapshot)

    async def fork(self, snapshot: Snapshot) -> Sandbox:
        return BoxAtHome(await at_home(self._box.fork, snapshot))

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        return BoxAtHome(await at_home(self._box.verifier, paths, most_bytes))

    async def close(self) -> None:
        return await at_home(self._box.close)
