"""Box of a bubblewrap fork server: commands, files, snapshots, verifiers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from sparring.errors import SpoiltFile, refusal
from sparring.protocols import OnOutput, Sandbox, Snapshot
from sparring.sandbox.commands import Pool, T
from sparring.sandbox.connection import BoxConnection, Call, Pump
from sparring.sandbox.file_commands import FILE_TIMEOUT_S
from sparring.sandbox.handles import BoxShell, KeptCommands, NoShell, ShellEnded
from sparring.sandbox.image_python import check_has_python, python_line, python_request
from sparring.sandbox.requests import as_bytes, placed
from sparring.sandbox.results import result_of
from sparring.sandbox.roots import Root, check_same_user
from sparring.sandbox.snapshots import LayeredSnapshot, check_prepared, checked
from sparring.sandbox.verifier import checked_paths, conversation, pipes_between, verifier_of
from sparring.types import MOST_BYTES, BoxSpec, ExecResult


class BoxPool(Pool, Protocol):
    """Pool as its boxes see it, which make others of it."""

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a new box, as `Boxes.take`."""

    def made(
        self, spec: BoxSpec, root: Root, joined: tuple[int, ...] = (), below: LayeredSnapshot | None = None
    ) -> BubblewrapBox:
        """Return a box of a root that is there, as `BubblewrapBoxes.made`."""


class BubblewrapBox(KeptCommands):
    """Box of one fork server. Its commands run at once, but while its caller reads or writes files no new one begins;
    cancelling the awaiting task kills the command. Implements `Sandbox`.

    `output_bytes` of the spec applies to stdout and stderr separately, so the kept output does not depend on how they
    interleave.

    Attributes:
        queued_s: seconds that its commands have waited for a slot of the pool.
    """

    _pool: BoxPool
    _latest: tuple[int, LayeredSnapshot] | None = None

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        stdin: str | bytes = "",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        on_output: OnOutput | None = None,
        user: int | None = None,
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
        request = {"op": "exec", **placed(argv, cwd, environment)}
        return await self._turned(request, as_bytes(stdin), timeout_s, output_bytes, on_output)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run code as `python3 -c` would, in a fork of a warm interpreter; in an image, on the image's `python3`."""
        if self._root.kind == "layers":
            return await self.exec(python_line(), stdin=code, timeout_s=timeout_s)
        return await self._turned({"op": "python"}, as_bytes(code), timeout_s)

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
        request = {
            "op": "program",
            **placed(argv, environment=self._root.program_environment(environment)),
            "port": port,
        }
        request["shown"] = self._pool.shown if self._root.kind == "layers" else []
        async with self._turn:
            pass
        call, rest = await self._begin(request, as_bytes(stdin), timeout_s, output_bytes)
        try:
            return await self._beside_server(call, rest, timeout_s, served)
        except SpoiltFile as error:
            if await self._shows_as_prepared(request):
                raise
            raise OSError(error.errno, error.strerror, error.filename) from error

    async def _beside_server(
        self, call: Call, rest: bytes, timeout_s: float, served: Callable[[socket.socket], Awaitable[None]]
    ) -> ExecResult:
        """Return the end of a program, whose server ends with it."""
        running = asyncio.create_task(self._ended(call, rest, timeout_s))
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
            call, _ = await box._begin({**request, "argv": []}, b"", FILE_TIMEOUT_S, 0)
            await box._ended(call, b"", FILE_TIMEOUT_S)
        except OSError:
            return False
        finally:
            await box.close()
        call.close_socket()
        return True

    async def shell(self, *, cwd: str | None = None, environment: Mapping[str, str] | None = None) -> BoxShell:
        """Start a shell, bash where the box has it.

        Raises:
            ShellEnded: a command has ended it, or spoilt what it needs.
            Exception: as `start`.
        """
        request, used = {"op": "shell", **placed((), cwd, environment)}, self._used
        try:
            return await self._begin_shell(request)
        except NoShell as error:
            if used and await self._has_shell_as_prepared():
                raise ShellEnded(f"a command of the box has spoilt its shell: {error}") from error
            raise

    def _as_prepared(self) -> BubblewrapBox:
        """Return a box of the state that verifiers are forks of: what fails here alone, a command has spoilt."""
        return self._pool.made(self.spec, self._root, below=self._line.prepared)

    async def _has_shell_as_prepared(self) -> bool:
        box = self._as_prepared()
        try:
            await box._begin_shell({"op": "shell", "argv": []})
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
        self._line.check()
        # a caller who is cancelled leaves no layer behind that the next snapshot would lack
        freezing = asyncio.create_task(self._freeze(ends, prepares))
        freezing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(freezing)

    async def _freeze(self, ends: bool, prepares: bool) -> LayeredSnapshot:
        async with self._turn, self.slot():
            connection = await self._open()
            late_s = max(0.0, self._busy_until - asyncio.get_running_loop().time()) + FILE_TIMEOUT_S
            call = connection.ask({"op": "snapshot", "ends": ends})
            try:
                passed = await self.soon(call.layers, late_s=late_s)
            finally:
                connection.forget(call)
            return self._line.add(passed.layers, passed.header["processes"], self._used, prepares=prepares)

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
        self._check_open()
        if self._line.prepared is None:
            check_prepared(self._used)
            await self.snapshot()
        judging = self._after(self._pool.made(self.spec, self._root, below=self._line.prepared))
        judging._line.judge = (self._line.prepared,)
        judging.start_opening()  # while this box reads its files
        return await verifier_of(self, judging, names, most_bytes)

    async def fresh(self) -> Sandbox:
        self._check_open()
        return self._after(self._pool.made(self.spec, self._root))

    async def beside(self, spec: BoxSpec) -> Sandbox:
        """Return a box with another spec from the same pool. The caller closes it.

        Raises:
            BadInput: the pool cannot make such a box, see `take`.
            SandboxError: this box has failed, or it or the pool is closed.
        """
        self._check_open()
        return self._after(await self._pool.take(spec))

    def _after(self, made: T) -> T:
        """Return a box for which this one was asked: what comes into it may be of this one's commands."""
        if isinstance(made, BubblewrapBox):
            made._made_from, made._is_handed_over = (None, True) if self._is_policys() else (self, False)
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
        self._check_open()
        judge = self._line.judge
        below = (*judge, await self._snapshot_since()) if judge else (None, None)
        ends = zip(pipes_between(), below, strict=True)
        asking, answering = (self._pool.made(self.spec, self._root, *end) for end in ends)
        result = await conversation((asking, code), (answering, other), self.spec.timeout_s, self._pool.slots)
        if result.exit_code and self._root.kind == "layers":
            await check_has_python(self._pool.made(self.spec, self._root, below=below[0]), self.spec.image)
        return result

    async def _snapshot_since(self) -> LayeredSnapshot:
        """Return a snapshot of the box's files as they are: the last one, if nothing has begun since."""
        if self._latest is None or self._latest[0] != self._num_begun:
            num_begun = self._num_begun
            self._latest = (num_begun, await self.snapshot())
        return self._latest[1]

    async def run_alone(self, code: str, limit_s: float) -> ExecResult:
        """Run Python code in an unused box for a caller that holds a slot."""
        request = python_request() if self._root.kind == "layers" else {"op": "python"}
        try:
            return result_of(await self._run(request, as_bytes(code), limit_s))
        finally:
            self._close_pipes()  # if the box did not start, the other one would wait for an answer

    def cancel(self) -> None:
        """End the commands that run, but not what was started to live on; their results are those of killed
        commands."""
        if self._connection is not None:
            self._connection.send({"id": 0, "op": "end"})

    async def close(self) -> None:
        if (opening := self.start_closing()) is not None:
            await asyncio.wait([opening])

    def start_closing(self) -> asyncio.Task[BoxConnection] | None:
        """End the box: now, or as soon as it has opened, whether somebody waits or not. Return the task that opens it,
        if it has begun and is not done."""
        self._end_reason = self._end_reason or "the box is closed"
        opening = self._opening
        if opening is None or opening.done():
            self._release()
            return None
        if not self._line.layers:  # else it gives borrowed layers back
            opening.cancel()
        opening.add_done_callback(lambda _: self._release())
        return opening

    def _release(self) -> None:
        """Give back all that the box holds; its processes end."""
        self._close_pipes()
        if self._connection is not None:
            self._connection.end("the box is closed")
        self._line.close()
        self._latest = None
        self._leave_group()

    async def _turned(
        self,
        request: dict[str, Any],
        body: bytes,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a command of the policy, once no file operation is under way."""
        async with self._turn:
            pass
        if on_output is None:
            told = await self._command(request, body, timeout_s, output_bytes)
        else:
            async with Pump(await self._open(), on_output) as pump:
                told = await pump.beside(self._command(request, body, timeout_s, output_bytes, pump))
        return result_of(told)


async def _serve(call: Call, served: Callable[[socket.socket], Awaitable[None]]) -> None:
    await served(await call.socket)
