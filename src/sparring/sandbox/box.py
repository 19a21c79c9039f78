"""Box of a bubblewrap fork server: commands, files, snapshots, verifiers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol, Unpack

from sparring.errors import SpoiltFile, refusal
from sparring.protocols import Command, Placement, Sandbox, Snapshot
from sparring.sandbox.commands import BoxCommands, Pool, T
from sparring.sandbox.connection import Call
from sparring.sandbox.files import BOUNDS, FileAccess
from sparring.sandbox.handles import BoxHandles, BoxShell, NoShell, ShellEnded
from sparring.sandbox.image_python import check_has_python, python_request
from sparring.sandbox.requests import as_bytes, bounds_of, request_of
from sparring.sandbox.results import result_of
from sparring.sandbox.roots import Root
from sparring.sandbox.snapshots import LayeredSnapshot, check_prepared, checked
from sparring.sandbox.verifier import carry, checked_paths, conversation, pipes_between
from sparring.types import MOST_BYTES, BoxSpec, ExecResult


class BoxPool(Pool, Protocol):
    """Pool as its boxes see it: they make other boxes with it."""

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a new box."""

    def made(
        self, spec: BoxSpec, root: Root, joined: tuple[int, ...] = (), below: LayeredSnapshot | None = None
    ) -> BubblewrapBox:
        """Return a box of the next fork server.

        Args:
            joined: pipe ends for the box's first command; the box closes them.
            below: snapshot that the box is a fork of.

        Raises:
            SandboxError: the pool is closed.
        """


class BubblewrapBox:
    """Box of one fork server: its commands, its files, its long-running processes, and the boxes made from it. Commands
    run concurrently, but none begins while the caller reads or writes files. Cancelling the awaiting task kills the
    command. Implements `Sandbox`.

    `output_bytes` of the spec applies to stdout and stderr separately, so the kept output does not depend on how they
    interleave.

    Raises:
        Exhausted: another command cannot begin, because commands of the box hold all processes or terminals, or
            `inner.boxes.MOST_RUNS` commands run.
    """

    def __init__(self, pool: BoxPool, root: Root, commands: BoxCommands) -> None:
        self._pool, self._root, self.spec = pool, root, commands.spec
        self.commands = commands
        self.files = files = FileAccess(commands)
        self.handles = handles = BoxHandles(commands)
        self._latest: tuple[int, LayeredSnapshot] | None = None
        self.read, self.write, self.entries = files.read, files.write, files.entries
        self.upload, self.download = files.upload, files.download
        self.start, self.terminal, self.connect = handles.start, handles.terminal, handles.connect
        self.hand_over = commands.hands.hand_over

    @property
    def queued_s(self) -> float:
        """Seconds that the box's commands have waited for a slot of the pool."""
        return self.commands.queued_s

    async def exec(self, argv: Sequence[str] | str, **command: Unpack[Command]) -> ExecResult:
        request = request_of("exec", self.spec, argv, command)
        return await self.commands.run(request, as_bytes(command.get("stdin", "")), command.get("on_output"))

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        request = python_request(self._root.kind == "layers", bounds_of(self.spec, timeout_s, None))
        return await self.commands.run(request, as_bytes(code))

    async def program(
        self,
        argv: Sequence[str],
        *,
        port: int,
        served: Callable[[socket.socket], Awaitable[None]],
        **command: Unpack[Command],
    ) -> ExecResult:
        """Run a program that finds a server at one port of its loopback interface, and no other network. Its address
        space is unlimited; memory, processes, files and output are limited as for every command, and its child
        processes end with it. It takes no slot of the pool: other commands run while it waits for the model.

        Args:
            port: port on 127.0.0.1 in the box.
            served: coroutine function that serves the port's listening socket and closes it; cancelled when the program
                has ended.
            command: how the program runs; `environment` is its whole environment, apart from an image's variables.

        Raises:
            BadInput: the pool runs no programs.
            PortTaken: a command of this box has the port.
            SpoiltFile: in an image, a command left something at a path where the program's files are mounted.
            OSError: the image itself, or `Env.prepare`, has something else at such a path.
        """
        if not self._pool.runs_programs:
            raise refusal("sandbox", "boxes that run programs", "others", "make the pool with mounts")
        command["environment"] = self._root.program_environment(command.get("environment") or {})
        request = {
            **request_of("program", self.spec, argv, command),
            "port": port,
            "shown": self._pool.program_paths if self._root.kind == "layers" else [],
        }
        await self.commands.after_files()
        call, rest = await self.commands.begin(request, as_bytes(command.get("stdin", "")))
        try:
            return await self._beside_server(call, rest, served)
        except SpoiltFile as error:
            if await self._shows_as_prepared(request):
                raise
            raise OSError(error.errno, error.strerror, error.filename) from error

    async def _beside_server(
        self, call: Call, rest: bytes, served: Callable[[socket.socket], Awaitable[None]]
    ) -> ExecResult:
        """Run a program and its server together, end both, and return the program's result."""
        running = asyncio.create_task(self.commands.ended(call, rest))
        serving = asyncio.create_task(_serve(call, served))
        try:
            await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not running.done():
                running.cancel()
                await asyncio.wait((running,))
                serving.result()
            return result_of(await running)
        finally:
            for task in (running, serving):
                task.cancel()
            await asyncio.gather(running, serving, return_exceptions=True)
            call.close_socket()

    async def _shows_as_prepared(self, request: Mapping[str, Any]) -> bool:
        with suppress(OSError):
            async with self._as_prepared() as box:
                call, _ = await box.commands.begin({**request, **BOUNDS, "argv": []}, b"")
                await box.commands.ended(call, b"")
                call.close_socket()
                return True
        return False

    async def shell(self, **placement: Unpack[Placement]) -> BoxShell:
        used = self.commands.hands.used
        try:
            return await self.handles.shell(**placement)
        except NoShell as error:
            if used and await self._has_shell_as_prepared():
                raise ShellEnded(f"a command of the box has spoilt its shell: {error}") from error
            raise

    @asynccontextmanager
    async def _as_prepared(self) -> AsyncIterator[BubblewrapBox]:
        """Lend a new box in the state in which verifiers start, to see whether a command broke what fails here."""
        box = self._pool.made(self.spec, self._root, below=self.commands.line.prepared)
        try:
            yield box
        finally:
            await box.close()

    async def _has_shell_as_prepared(self) -> bool:
        with suppress(NoShell):
            async with self._as_prepared() as box:
                await box.handles.shell()
                return True
        return False

    async def snapshot(self, *, ends: bool = False) -> LayeredSnapshot:
        self.commands.line.check()
        # a caller who is cancelled leaves no layer behind that the next snapshot would lack
        freezing = asyncio.create_task(self._freeze(ends))
        freezing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(freezing)

    async def snapshot_prepared(self) -> LayeredSnapshot:
        """Make a snapshot as `snapshot` does, and fork later verifiers from it instead of any earlier one."""
        self.commands.line.prepared = replace(await self.snapshot(), prepared=None)
        return self.commands.line.prepared

    async def _freeze(self, ends: bool) -> LayeredSnapshot:
        passed = await self.commands.freeze(ends)
        used, processes = self.commands.hands.used, passed.header["processes"]
        return self.commands.line.add(passed.layers, processes, used)

    async def fork(self, snapshot: Snapshot) -> BubblewrapBox:
        state = checked(snapshot)
        return self._after(self._pool.made(state.spec, state.root, below=state))

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        names = checked_paths(paths)
        self.commands.check_open()
        if self.commands.line.prepared is None:
            check_prepared(self.commands.hands.used)
            await self.snapshot()
        judging = self._after(self._pool.made(self.spec, self._root, below=self.commands.line.prepared))
        judging.commands.line.judge = (self.commands.line.prepared,)
        judging.commands.start_opening()  # while this box reads its files
        try:
            await carry(self.files, judging.files, names, most_bytes)
        except BaseException:
            await judging.close()
            raise
        return judging

    async def fresh(self) -> Sandbox:
        self.commands.check_open()
        return self._after(self._pool.made(self.spec, self._root))

    async def beside(self, spec: BoxSpec) -> Sandbox:
        """Return a box with another spec from the same pool. The caller closes it."""
        self.commands.check_open()
        return self._after(await self._pool.take(spec))

    def _after(self, made: T) -> T:
        """Return a new box, after noting that its content may come from commands of this one."""
        if isinstance(made, BubblewrapBox):
            made.commands.hands.take_from(self.commands.hands)
        return made

    async def converse(self, code: str, other: str) -> ExecResult:
        self.commands.check_open()
        judge = self.commands.line.judge
        below = (*judge, await self._snapshot_since()) if judge else (None, None)
        ends = zip(pipes_between(), below, strict=True)
        asking, answering = (self._pool.made(self.spec, self._root, *end).commands for end in ends)
        in_image = self._root.kind == "layers"
        result = await conversation((asking, code), (answering, other), in_image, self._pool.slots)
        if result.exit_code and in_image:
            await check_has_python(self._pool.made(self.spec, self._root, below=below[0]), self.spec.image)
        return result

    async def _snapshot_since(self) -> LayeredSnapshot:
        """Return a snapshot of the box's current files: the latest one, if no command has begun since."""
        if self._latest is None or self._latest[0] != self.commands.num_begun:
            num_begun = self.commands.num_begun
            self._latest = (num_begun, await self.snapshot())
        return self._latest[1]

    async def close(self) -> None:
        self._latest = None
        await self.commands.close()


async def _serve(call: Call, served: Callable[[socket.socket], Awaitable[None]]) -> None:
    await served(await call.socket)
