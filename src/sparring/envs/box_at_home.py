"""`BoxAtHome`: a box that code on an environment's own thread can call, although it belongs to the run's event loop."""

from __future__ import annotations

import functools
import inspect
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, cast

from sparring.envs.executor import at_home
from sparring.protocols import Command, LiveProcess, Sandbox, Shell, Snapshot, Terminal
from sparring.types import MOST_BYTES, EntryKind, ExecResult, TreeEntry


class HandleAtHome:
    """LiveProcess, shell or terminal whose coroutine functions run on the run's event loop."""

    def __init__(self, handle: LiveProcess | Shell | Terminal) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._handle, name)
        return functools.partial(at_home, value) if inspect.iscoroutinefunction(value) else value


class BoxAtHome:
    """Box that forwards calls to the run's event loop. Implements `protocols.Sandbox`; other attributes are the box's
    own."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, argv: Sequence[str] | str, **command: Unpack[Command]) -> ExecResult:
        return await at_home(self._box.exec, argv, **command)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        return await at_home(self._box.python, code, timeout_s=timeout_s)

    async def start(self, argv: Sequence[str] | str, **named: Any) -> LiveProcess:
        return cast(LiveProcess, HandleAtHome(await at_home(self._box.start, argv, **named)))

    async def shell(self, **named: Any) -> Shell:
        return cast(Shell, HandleAtHome(await at_home(self._box.shell, **named)))

    async def terminal(self, argv: Sequence[str] | str, **named: Any) -> Terminal:
        return cast(Terminal, HandleAtHome(await at_home(self._box.terminal, argv, **named)))

    async def connect(self, port: int) -> socket.socket:
        return await at_home(self._box.connect, port)

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        return await at_home(self._box.upload, tree, path)

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        return await at_home(self._box.download, path, most_bytes)

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

    async def snapshot(self, *, ends: bool = False) -> Snapshot:
        return await at_home(self._box.snapshot, ends=ends)

    async def fork(self, snapshot: Snapshot) -> Sandbox:
        return BoxAtHome(await at_home(self._box.fork, snapshot))

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        return BoxAtHome(await at_home(self._box.verifier, paths, most_bytes))

    async def close(self) -> None:
        return await at_home(self._box.close)
