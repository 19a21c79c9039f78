"""Box of a bubblewrap fork server: commands, files, snapshots, verifiers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Unpack

from sparring.errors import SpoiltFile, refusal
from sparring.protocols import Command, Placement, Sandbox, Snapshot
from sparring.sandbox.commands import BoxCommands, Pool, T
from sparring.sandbox.connection import Call
from sparring.sandbox.files import BOUNDS, FileAccess
from sparring.sandbox.groups import BoxGroup
from sparring.sandbox.handles import BoxHandles, BoxShell, NoShell, ShellEnded
from sparring.sandbox.image_python import check_has_python, python_request
from sparring.sandbox.requests import as_bytes, bounds_of, request_of
from sparring.sandbox.results import result_of
from sparring.sandbox.roots import Root, check_same_user
from sparring.sandbox.snapshots import LayeredSnapshot, check_prepared, checked
from sparring.sandbox.verifier import carry, checked_paths, conversation, pipes_between
from sparring.types import MOST_BYTES, BoxSpec, ExecResult


class BoxPool(Pool, Protocol):
    """Pool as its boxes see it, which make others of it."""

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a new box, as `Boxes.take`."""

    def made(
        self, spec: BoxSpec, root: Root, joined: tuple[int, ...] = (), below: LayeredSnapshot | None = None
    ) -> BubblewrapBox:
        """Return a box of a root that is there, as `BubblewrapBoxes.made`."""


class BubblewrapBox:
    """Box of one fork server: its commands, its files, what lives on in it, and the boxes that are made from it. Its
    commands run at once, but while its caller reads or writes files no new one begins; cancelling the awaiting task
    kills the command. Implements `Sandbox`.

    `output_bytes` of the spec applies to stdout and stderr separately, so the kept output does not depend on how they
    interleave.

    Args:
        pool: its pool.
        root: its root.
        commands: its commands.

    Attributes:
        spec: its spec.
        commands: its commands.
        files: its files.
        handles: beginner of what lives on in it.
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
    def group(self) -> BoxGroup | None:
        """Control group of its commands; None without control groups or before the first command."""
        return self.commands.group

    @property
    def queued_s(self) -> float:
        """Seconds that its commands have waited for a slot of the pool."""
        return self.commands.queued_s

    async def exec(
        self, argv: Sequence[str] | str, *, user: int | None = None, **command: Unpack[Command]
    ) -> ExecResult:
        """Run a program, or a text of sh, in /box or another folder of the box. The exit code is a shell's: 126, 127,
        or 128 + n after signal n. What it leaves running ends with it.

        Raises:
            FileNotFoundError: there is no folder `cwd`.
            SpoiltFile: a command of this box left something else there, or took permission away.
            BadInput: the user is not the box's: a box has one.
            Exhausted: `MOST_RUNS` of `inner.boxes` run already, or they hold all processes.
            SandboxError: the box failed.
        """
        check_same_user(self.spec, user)
        request = request_of("exec", self.spec, argv, command)
        return await self.commands.run(request, as_bytes(command.get("stdin", "")), command.get("on_output"))

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run code as `python3 -c` would, in a fork of a warm interpreter; in an image, on the image's `python3`."""
        request = python_request(self._root.kind == "layers", bounds_of(self.spec, timeout_s, None))
        return await self.commands.run(request, as_bytes(code))

    async def program(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: str = "",
        port: int,
        timeout_s: float,
        output_bytes: int,
        served: Callable[[socket.socket], Awaitable[None]],
    ) -> ExecResult:
        """Run a program that finds a server at one port of its loopback interface, and no other network. Its address
        space is unlimited; memory, processes, files and output are limited as for every command, and its child
        processes end with it. It takes no slot of the pool: other commands run while it waits for the model.

        Args:
            argv: program and arguments.
            environment: complete environment of the program.
            stdin: standard input.
            port: port on 127.0.0.1 in the box.
            timeout_s: seconds after which the program is killed.
            output_bytes: maximum number of returned bytes of standard output and standard error each.
            served: coroutine function that serves the port's listening socket and closes it; cancelled when the program
                has ended.

        Raises:
            BadInput: the pool runs no programs.
            PortTaken: a command of this box has the port.
            Exhausted: commands of this box hold all processes or slots of it.
            SpoiltFile: in an image, a command left something where the program's files are shown.
            OSError: the image has something there, or what the world prepared.
            SandboxError: the box failed.
        """
        if not self._pool.runs_programs:
            raise refusal("sandbox", "boxes that run programs", "others", "make the pool with mounts")
        command = Command(
            environment=self._root.program_environment(environment), timeout_s=timeout_s, output_bytes=output_bytes
        )
        request = {
            **request_of("program", self.spec, argv, command),
            "port": port,
            "shown": self._pool.shown if self._root.kind == "layers" else [],
        }
        await self.commands.after_files()
        call, rest = await self.commands.begin(request, as_bytes(stdin))
        try:
            return await self._beside_server(call, rest, served)
        except SpoiltFile as error:
            if await self._shows_as_prepared(request):
                raise
            raise OSError(error.errno, error.strerror, error.filename) from error

    async def _beside_server(
        self, call: Call, rest: bytes, served: Callable[[socket.socket], Awaitable[None]]
    ) -> ExecResult:
        """Return the end of a program, whose server ends with it."""
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
        """Return whether a program's files can be shown in the box as it was prepared."""
        box = self._as_prepared()
        try:
            call, _ = await box.commands.begin({**request, **BOUNDS, "argv": []}, b"")
            await box.commands.ended(call, b"")
        except OSError:
            return False
        finally:
            await box.close()
        call.close_socket()
        return True

    async def shell(self, **placement: Unpack[Placement]) -> BoxShell:
        """Start a shell, bash where the box has it.

        Raises:
            ShellEnded: a command has ended it, or spoilt what it needs.
            Exception: as `start`.
        """
        used = self.commands.hands.used
        try:
            return await self.handles.shell(**placement)
        except NoShell as error:
            if used and await self._has_shell_as_prepared():
                raise ShellEnded(f"a command of the box has spoilt its shell: {error}") from error
            raise

    def _as_prepared(self) -> BubblewrapBox:
        """Return a box of the state that verifiers are forks of: what fails here alone, a command has spoilt."""
        return self._pool.made(self.spec, self._root, below=self.commands.line.prepared)

    async def _has_shell_as_prepared(self) -> bool:
        box = self._as_prepared()
        try:
            await box.handles.shell()
        except NoShell:
            return False
        finally:
            await box.close()
        return True

    async def snapshot(self, *, ends: bool = False) -> LayeredSnapshot:
        """Freeze the box's files, and return them as what other boxes are forks of. Nothing is copied: the box goes on
        in a new layer on top. It waits for commands that run, and none begins meanwhile.

        Args:
            ends: end what lives on in the box, whose processes the snapshot then names.

        Raises:
            BadInput: processes live on in the box, or it has too many layers.
            SandboxError: the box is closed or failed.
        """
        return await self._frozen(ends)

    async def snapshot_prepared(self) -> LayeredSnapshot:
        """Freeze the box's files as `snapshot` does. From now on verifiers are forks of this snapshot, and of
        none before it.

        Raises:
            Exception: as `snapshot`.
        """
        return await self._frozen(False, prepares=True)

    async def _frozen(self, ends: bool, *, prepares: bool = False) -> LayeredSnapshot:
        self.commands.line.check()
        # a caller who is cancelled leaves no layer behind that the next snapshot would lack
        freezing = asyncio.create_task(self._freeze(ends, prepares))
        freezing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(freezing)

    async def _freeze(self, ends: bool, prepares: bool) -> LayeredSnapshot:
        passed = await self.commands.freeze(ends)
        used, processes = self.commands.hands.used, passed.header["processes"]
        return self.commands.line.add(passed.layers, processes, used, prepares=prepares)

    async def fork(self, snapshot: Snapshot) -> BubblewrapBox:
        """Return a new box with the files, the working folder and the environment of a snapshot. The caller closes it.
        The snapshot's box may be closed.

        Raises:
            BadInput: the snapshot is not of these boxes.
            SandboxError: the pool is closed.
        """
        state = checked(snapshot)
        return self._after(self._pool.made(state.spec, state.root, below=state))

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        """Return a box in which nothing but files of these names comes from this one: a fork of what
        `Env.prepare` left, else of this box's first snapshot, else of this box if no command has run in it. The caller
        closes it.

        `converse` in it runs `code` without the files, and `other` with them.

        Args:
            paths: files; relative paths start at the working folder. One that is missing here is missing there.
            most_bytes: maximum size of each file.

        Raises:
            BadInput: a path is none, or commands have run in this box and it has no snapshot.
            SpoiltFile: at a path, or in a folder on the way, a command left something else, such as a link, or a larger
                file.
            SandboxError: a box failed.
        """
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
        """Return a box with another spec from the same pool. The caller closes it.

        Raises:
            BadInput: the pool cannot make such a box, see `take`.
            SandboxError: this box has failed, or it or the pool is closed.
        """
        self.commands.check_open()
        return self._after(await self._pool.take(spec))

    def _after(self, made: T) -> T:
        """Return a box for which this one was asked: what comes into it may be of this one's commands."""
        if isinstance(made, BubblewrapBox):
            made.commands.hands.take_from(self.commands.hands)
        return made

    async def converse(self, code: str, other: str) -> ExecResult:
        """Return the result of `code`, which runs at once with `other`, each in a box of its own: a fresh one, or in a
        verifier a fork, `code` without the policy's files and `other` with them. Two pipes join them: each writes to
        file descriptor 201 and reads from 200. `other` has the time limit of the spec, `code` twice as much; the end of
        `code` ends `other`. Together they take one slot of the pool, since one of them usually waits.

        Raises:
            BadInput: the box has an image of its own, which has no Python.
            SandboxError: a box failed and `code` failed because of it, or this box is closed.
        """
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
        """Return a snapshot of the box's files as they are: the last one, if nothing has begun since."""
        if self._latest is None or self._latest[0] != self.commands.num_begun:
            num_begun = self.commands.num_begun
            self._latest = (num_begun, await self.snapshot())
        return self._latest[1]

    def cancel(self) -> None:
        """End the commands that run, but not what was started to live on; their results are those of killed
        commands."""
        self.commands.cancel()

    async def close(self) -> None:
        self._latest = None
        await self.commands.close()


async def _serve(call: Call, served: Callable[[socket.socket], Awaitable[None]]) -> None:
    await served(await call.socket)
