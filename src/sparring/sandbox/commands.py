"""Commands of one box over its connection: begun, fed, waited for, given up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from sparring.errors import SandboxError
from sparring.open_files import allow_files
from sparring.sandbox.connection import WINDOW_BYTES, BoxConnection, Call, Sink, Told
from sparring.sandbox.groups import BoxGroup, BoxGroups, pass_doors
from sparring.sandbox.requests import check_count, check_seconds
from sparring.sandbox.roots import Root
from sparring.sandbox.server import Server
from sparring.sandbox.snapshots import LayeredSnapshot, Line, lent
from sparring.sandbox.spoilt import FILE_OPERATIONS
from sparring.types import BoxSpec

FILES, PROGRAM_FILES = 256, 4096
"""Maximum number of open files of a process: `PROGRAM_FILES` in a pool of boxes that run programs, `FILES` in any
other."""
BOX_FILES, USER_FILES = 16384, 512
"""Open files of the box's own process, and how many an ordinary user keeps of his limit for the run."""
INLINE_BYTES = 1 << 16  # of standard input, in the request itself


T = TypeVar("T")


def most_files(runs_programs: bool) -> tuple[int, int]:
    """Return how many files the box's own process and a process of a command may have open.

    The kernel counts descriptors that are under way between processes for a user's processes together, and refuses more
    of whoever has a limit of files below that count. Commands reach their own limit, and 253 for each that passes some
    at that moment. So the box's process, which passes sockets and layers, has a limit far above theirs, and an ordinary
    user's run keeps some of its own.
    """
    most = allow_files()
    box = min(BOX_FILES, most)
    wanted = PROGRAM_FILES if runs_programs else FILES
    return box, min(wanted, box // 2, most if os.geteuid() == 0 else max(FILES, most - USER_FILES))


class Pool(Protocol):
    """Pool as its boxes see it: a slot for each command, and the seconds that an answer may be late."""

    runs_programs: bool
    shown: list[str]
    slots: asyncio.Semaphore
    groups: BoxGroups
    grace_s: float


class BoxCommands:
    """Box as a runner of commands, over one connection that opens with the first.

    Args:
        pool: its pool.
        spec: its spec.
        root: its root.
        server: fork server that starts it.
        joined: pipe ends for its first command, which it closes.
        below: snapshot that it is a fork of.

    Attributes:
        spec: its spec.
        group: control group of its commands; None without control groups or before the first command.
        queued_s: seconds that its commands have waited for a slot of the pool.
    """

    def __init__(
        self,
        pool: Pool,
        spec: BoxSpec,
        root: Root,
        server: Server,
        joined: tuple[int, ...],
        below: LayeredSnapshot | None,
    ) -> None:
        self._pool = pool
        self.spec = spec
        self._root = root
        self._server = server
        self._joined = joined
        self._line = Line(spec, root, below)
        self._turn = asyncio.Lock()
        self._opening: asyncio.Task[BoxConnection] | None = None
        self._connection: BoxConnection | None = None
        self._busy_until = 0.0
        self.group: BoxGroup | None = None
        self.queued_s = 0.0
        self._num_begun = 0
        self._used = self._line.used
        self._is_handed_over = False
        self._made_from: BoxCommands | None = None
        self._end_reason: str | None = None

    def hand_over(self) -> None:
        """Note that the policy acts from now on: what fails may be its doing even before it has run a command."""
        self._is_handed_over = True

    def _is_policys(self) -> bool:
        return self._used or self._is_handed_over or self._made_from is not None and self._made_from._is_policys()

    def limit_s(self, timeout_s: float | None) -> float:
        """Return a command's time limit in seconds.

        Raises:
            BadInput: it is none.
        """
        if timeout_s is None:
            return self.spec.timeout_s
        check_seconds("timeout_s", timeout_s)
        return timeout_s

    def most_output(self, output_bytes: int | None) -> int:
        """Return how many bytes are kept of each stream of a command.

        Raises:
            BadInput: it is no number of bytes.
        """
        if output_bytes is None:
            return self.spec.output_bytes
        check_count("output_bytes", output_bytes)
        return output_bytes

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot of the pool."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._pool.slots:
            self.queued_s += clock() - began
            yield

    async def soon(self, *answers: asyncio.Future[T], late_s: float = 0.0) -> T:
        """Return the first of the box's answers, which comes at once or after `late_s` seconds.

        Raises:
            SandboxError: the box failed: it does not answer, or has ended.
        """
        done, _ = await asyncio.wait(answers, timeout=late_s + self._pool.grace_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            assert self._connection is not None
            why = f"no answer {self._pool.grace_s} s after it was due"
            self._connection.end(why)
            raise SandboxError(f"sandbox: box failed: {why}")
        ended = [answer for answer in answers if answer in done]
        return next((answer for answer in ended if answer.exception() is None), ended[0]).result()

    async def _command(
        self,
        request: dict[str, Any],
        body: bytes,
        timeout_s: float | None,
        output_bytes: int | None = None,
        sink: Sink | None = None,
    ) -> Told:
        """Run a command in a slot of the pool."""
        async with self.slot():
            return await self._run(request, body, self.limit_s(timeout_s), output_bytes, sink)

    async def _run(
        self,
        request: dict[str, Any],
        body: bytes,
        limit_s: float,
        output_bytes: int | None = None,
        sink: Sink | None = None,
    ) -> Told:
        """Run a command to its end."""
        call, rest = await self._begin(request, body, limit_s, output_bytes, sink)
        return await self._ended(call, rest, limit_s)

    async def _begin(
        self,
        request: dict[str, Any],
        body: bytes,
        limit_s: float | None,
        output_bytes: int | None = None,
        sink: Sink | None = None,
    ) -> tuple[Call, bytes]:
        """Ask for a command; return it with what is left of its standard input."""
        connection = await self._open()
        inline = len(body) if request["op"] == "python" else INLINE_BYTES
        request |= {
            "timeout": limit_s,
            "output": self.most_output(output_bytes),
            "input_ends": len(body) <= inline and not request.get("kept"),
            "credit": None if sink is None else request.get("credit", WINDOW_BYTES),
        }
        self._num_begun += 1
        call = connection.ask(request, body[:inline], sink)
        self._used |= request["op"] not in FILE_OPERATIONS
        return call, body[inline:]

    async def _ended(self, call: Call, rest: bytes, limit_s: float) -> Told:
        """Return the end of a command, which is fed the `rest` of its standard input."""
        assert self._connection is not None
        self._busy_until = max(self._busy_until, asyncio.get_running_loop().time() + limit_s)
        feeding = asyncio.create_task(self._connection.feed(call, rest, ends=True)) if rest else None
        try:
            return await self.soon(call.told, late_s=limit_s)
        except asyncio.CancelledError:
            self._connection.give_up(call)
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise SandboxError(f"sandbox: {self._end_reason}")

    def start_opening(self) -> asyncio.Task[BoxConnection]:
        """Start the box if it has no connection, and return the task that opens it.

        Raises:
            SandboxError: the box is closed or failed.
        """
        self._check_open()
        if self._opening is None or self._opening.done() and self._connection is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody asks
        return self._opening

    async def _open(self) -> BoxConnection:
        """Return the box's connection; start the box first if it has none."""
        # whoever opens a fork has borrowed its layers and gives them back, even if the caller is cancelled
        opening = self.start_opening()
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and (task is None or not task.cancelling()):
                self._check_open()  # the box was closed meanwhile
            raise

    async def _connect(self) -> BoxConnection:
        layers = self._line.layers
        async with lent(layers) as frozen:
            link = await self._server.connect(self._joined, frozen)
            try:
                self.group = self._pool.groups.make(self.spec.memory_bytes, self.spec.disk_bytes, self.spec.processes)
                pass_doors(link, self.group)
            except OSError as error:
                link.close()
                self._leave_group()
                raise SandboxError(f"sandbox: no control group for a box: {error}") from error
            connection = BoxConnection(link, self._note_end, self._with_group, self._is_policys)
            self._connection = connection
            self._close_pipes()
            if not layers:
                connection.send(self._limits())
                return connection
            returned = await self.soon(connection.ask(self._limits()).layers)
            for layer, new in zip(layers, returned.layers, strict=True):
                layer.replace(new)
            return connection

    def _limits(self) -> dict[str, Any]:
        """Return what the box is told when it starts."""
        spec = self.spec
        limits = {"memory": spec.memory_bytes, "disk": spec.disk_bytes, "processes": spec.processes, "user": spec.user}
        limits["own_files"], limits["files"] = most_files(self._pool.runs_programs)
        limits["sessions"] = self.group is not None or self._pool.runs_programs
        return {**limits, **self._root.limits(), **self._line.limits()}

    def _with_group(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what is told of a command's end, with what the kernel did for the memory of the box's group."""
        if self.group is not None and self.group.killed() and header["end"] in ("exited", "signalled"):
            return {**header, "end": "out of memory"}
        return header

    def _leave_group(self) -> None:
        if self.group is not None:
            self._pool.groups.leave(self.group)
            self.group = None

    def _note_end(self, why: str) -> str:
        self._end_reason = self._end_reason or f"{why}{self._server.last_words()}"
        return self._end_reason

    def _close_pipes(self) -> None:
        for file in self._joined:
            os.close(file)
        self._joined = ()
