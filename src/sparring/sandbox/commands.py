"""Commands of one box over its connection: start, input, result, cancellation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from sparring.errors import SandboxError
from sparring.open_files import allow_files
from sparring.protocols import OnOutput
from sparring.sandbox.connection import WINDOW_BYTES, BoxConnection, Call, Passed, Pump, Sink, Told
from sparring.sandbox.fault import FILE_OPERATIONS, Hands
from sparring.sandbox.groups import BoxGroup, BoxGroups, pass_doors
from sparring.sandbox.requests import as_bytes
from sparring.sandbox.results import result_of
from sparring.sandbox.roots import Root
from sparring.sandbox.server import Server
from sparring.sandbox.snapshots import LayeredSnapshot, Line, lent
from sparring.types import BoxSpec, ExecResult

FILES, PROGRAM_FILES = 256, 4096
"""Maximum number of open files of a process: `PROGRAM_FILES` in a pool of boxes that run programs, `FILES` in any
other."""
BOX_FILES, USER_FILES = 16384, 512
"""Maximum open files of the box's own process, and open files that an unprivileged run keeps for itself."""
INLINE_BYTES = 1 << 16  # of standard input, in the request itself
FREEZE_S = 10.0
"""Seconds that a box may take to freeze its files after its commands have ended."""


T = TypeVar("T")


def most_files(runs_programs: bool) -> tuple[int, int]:
    """Return how many files the box's own process and a process of a command may have open.

    The kernel counts the descriptors that all processes of a user have sent over sockets and nobody has received yet. A
    process cannot send more if this count exceeds its own limit of files. Commands can raise the count to their limit,
    plus 253 for each command that is sending. So the box's process, which sends sockets and layers, has a far higher
    limit, and an unprivileged run keeps some files for itself.
    """
    most = allow_files()
    box = min(BOX_FILES, most)
    wanted = PROGRAM_FILES if runs_programs else FILES
    return box, min(wanted, box // 2, most if os.geteuid() == 0 else max(FILES, most - USER_FILES))


class Pool(Protocol):
    """Pool as its boxes see it: a slot for each command, and `grace_s` as the seconds that an answer may be late."""

    runs_programs: bool
    program_paths: list[str]
    slots: asyncio.Semaphore
    groups: BoxGroups
    grace_s: float


class BoxCommands:
    """Commands of a box, over one connection that opens with the first command.

    Args:
        joined: pipe ends for the first command, which this object closes.
        below: snapshot that the box is a fork of.

    Attributes:
        line: snapshots of the box.
        hands: record of whether the policy may have changed the box.
        turn: lock, held while the caller reads or writes files.
        group: control group; None without control groups or before the first command.
        queued_s: seconds that commands have waited for a slot of the pool.
        num_begun: number of commands that have begun.
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
        self.spec, self.server = spec, server
        self._pool, self._root, self._joined = pool, root, joined
        self.line = Line(spec, root, below)
        self.hands = Hands(self.line.used)
        self.turn = asyncio.Lock()
        self.group: BoxGroup | None = None
        self.queued_s = 0.0
        self.num_begun = 0
        self._opening: asyncio.Task[BoxConnection] | None = None
        self._connection: BoxConnection | None = None
        self._busy_until = 0.0
        self._end_reason: str | None = None

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot of the pool."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._pool.slots:
            self.queued_s += clock() - began
            yield

    async def after_files(self) -> None:
        """Wait until no file operation is under way."""
        async with self.turn:
            pass

    async def soon(self, *answers: asyncio.Future[T], late_s: float = 0.0) -> T:
        """Return the first of the box's answers, which are due in `late_s` seconds.

        Raises:
            SandboxError: the box has ended, or no answer came within the pool's `grace_s` seconds after that.
        """
        done, _ = await asyncio.wait(answers, timeout=late_s + self._pool.grace_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            assert self._connection is not None
            why = f"no answer {self._pool.grace_s} s after it was due"
            self._connection.end(why)
            raise SandboxError(f"sandbox: box failed: {why}")
        ended = [answer for answer in answers if answer in done]
        return next((answer for answer in ended if answer.exception() is None), ended[0]).result()

    async def run(self, request: dict[str, Any], body: bytes, on_output: OnOutput | None = None) -> ExecResult:
        """Run a command of the policy, once no file operation is under way."""
        await self.after_files()
        if on_output is None:
            return result_of(await self.told(request, body))
        async with Pump(await self.open(), on_output) as pump:
            return result_of(await pump.beside(self.told(request, body, pump)))

    async def told(self, request: dict[str, Any], body: bytes = b"", sink: Sink | None = None) -> Told:
        """Run a command in a slot of the pool, and return the box's report of its end."""
        async with self.slot():
            return await self.ended(*await self.begin(request, body, sink))

    async def run_alone(self, request: dict[str, Any], code: str) -> ExecResult:
        """Run `code` as the only command of a box, for a caller that holds a slot."""
        try:
            return result_of(await self.ended(*await self.begin(request, as_bytes(code))))
        finally:
            self._close_pipes()  # if the box did not start, the other one would wait for an answer

    async def begin(self, request: dict[str, Any], body: bytes, sink: Sink | None = None) -> tuple[Call, bytes]:
        """Request a command. Return it with the part of its standard input that has not been sent."""
        connection = await self.open()
        inline = len(body) if request["op"] == "python" else INLINE_BYTES
        request["input_ends"] = len(body) <= inline and not request.get("kept")
        request["credit"] = None if sink is None else request.get("credit", WINDOW_BYTES)
        self.num_begun += 1
        call = connection.ask(request, body[:inline], sink)
        self.hands.used |= request["op"] not in FILE_OPERATIONS
        return call, body[inline:]

    async def begin_live(self, request: dict[str, Any], sink: Sink | None = None) -> tuple[BoxConnection, Call]:
        """Start a process, shell or terminal, once no file operation is under way."""
        await self.after_files()
        call, _ = await self.begin(request, b"", sink)
        assert self._connection is not None
        try:
            await self.soon(call.begun, call.told)
        except BaseException:
            self._connection.give_up(call)
            raise
        return self._connection, call

    async def ended(self, call: Call, rest: bytes) -> Told:
        """Send a command the `rest` of its standard input, and return the box's report of its end."""
        assert self._connection is not None
        limit_s = call.asked.request["timeout"]
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

    async def freeze(self, ends: bool) -> Passed:
        """Freeze the box's files after its commands have ended; return the layers. `ends`: end live processes."""
        async with self.turn, self.slot():
            connection = await self.open()
            late_s = max(0.0, self._busy_until - asyncio.get_running_loop().time()) + FREEZE_S
            call = connection.ask({"op": "snapshot", "ends": ends})
            try:
                return await self.soon(call.layers, late_s=late_s)
            finally:
                connection.forget(call)

    def check_open(self) -> None:
        """Refuse whatever is asked of a box that has ended.

        Raises:
            SandboxError: the box is closed or failed.
        """
        if self._end_reason is not None:
            raise SandboxError(f"sandbox: {self._end_reason}")

    def start_opening(self) -> asyncio.Task[BoxConnection]:
        """Start the box if it has no connection, and return the task that opens it.

        Raises:
            SandboxError: the box is closed or failed.
        """
        self.check_open()
        if self._opening is None or self._opening.done() and self._connection is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody asks
        return self._opening

    async def open(self) -> BoxConnection:
        """Return the box's connection; start the box first if it has none."""
        # whoever opens a fork has borrowed its layers and gives them back, even if the caller is cancelled
        opening = self.start_opening()
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and (task is None or not task.cancelling()):
                self.check_open()  # the box was closed meanwhile
            raise

    async def _connect(self) -> BoxConnection:
        layers = self.line.layers
        async with lent(layers) as frozen:
            link = await self.server.connect(self._joined, frozen)
            try:
                self.group = self._pool.groups.make(self.spec.memory_bytes, self.spec.disk_bytes, self.spec.processes)
                pass_doors(link, self.group)
            except OSError as error:
                link.close()
                self._leave_group()
                raise SandboxError(f"sandbox: no control group for a box: {error}") from error
            connection = BoxConnection(link, self._note_end, self._with_group, self.hands.are_policys)
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
        """Return the first request to a box: its limits, its root, and what it inherits from a snapshot."""
        spec = self.spec
        limits = {"memory": spec.memory_bytes, "disk": spec.disk_bytes, "processes": spec.processes, "user": spec.user}
        limits["own_files"], limits["files"] = most_files(self._pool.runs_programs)
        limits["sessions"] = self.group is not None or self._pool.runs_programs
        return {**limits, **self._root.limits(), **self.line.limits()}

    def _with_group(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a command's final header, with "out of memory" if the kernel killed a process of the group."""
        if self.group is not None and self.group.killed() and header["end"] in ("exited", "signalled"):
            return {**header, "end": "out of memory"}
        return header

    def _leave_group(self) -> None:
        if self.group is not None:
            self._pool.groups.leave(self.group)
            self.group = None

    def _note_end(self, why: str) -> str:
        self._end_reason = self._end_reason or f"{why}{self.server.last_words()}"
        return self._end_reason

    def cancel(self) -> None:
        """Kill the commands that run, but not processes, shells and terminals."""
        if self._connection is not None:
            self._connection.send({"id": 0, "op": "end"})

    async def close(self) -> None:
        """End the box with all its processes."""
        if (opening := self.start_closing()) is not None:
            await asyncio.wait([opening])

    def start_closing(self) -> asyncio.Task[BoxConnection] | None:
        """End the box, now or as soon as it has opened, even if nobody waits. Return the task that opens the box, if
        this task has begun and is not done."""
        self._end_reason = self._end_reason or "the box is closed"
        opening = self._opening
        if opening is None or opening.done():
            self._release()
            return None
        if not self.line.layers:  # else it gives borrowed layers back
            opening.cancel()
        opening.add_done_callback(lambda _: self._release())
        return opening

    def _release(self) -> None:
        """Give back all that the box holds; its processes end."""
        self._close_pipes()
        if self._connection is not None:
            self._connection.end("the box is closed")
        self.line.close()
        self._leave_group()

    def _close_pipes(self) -> None:
        for file in self._joined:
            os.close(file)
        self._joined = ()
