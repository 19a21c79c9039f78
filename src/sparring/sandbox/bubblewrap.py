"""Boxes made by bubblewrap fork servers, in a few milliseconds each and without a daemon. `inner.boxes` describes the
mechanism, docs/sandbox.md what is isolated."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from sparring.errors import SandboxError, refusal
from sparring.protocols import OnOutput, Sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.connection import WINDOW_BYTES, Call, BoxConnection, Pump, Refused, Sink, Told
from sparring.sandbox.off_box import OffBox
from sparring.sandbox.results import result_of
from sparring.sandbox.server import Server
from sparring.sandbox.spoilt import PortTaken, raise_for
from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult

FILES, PROGRAM_FILES = 256, 4096
"""Maximum number of open files of a process: `PROGRAM_FILES` in a pool of boxes that run programs, `FILES` in any
other."""
INLINE_BYTES = 1 << 16  # of standard input, in the request itself
FILE_TIMEOUT_S = 10.0  # for read and write, which run for the caller and not for the policy


class BubblewrapBoxes:
    """Pool of boxes for one event loop. Servers start with the first command, so creating a pool costs nothing.
    Implements `Boxes`.

    Args:
        config: `[sandbox]`.
        mounts: files and folders of the host that programs need, by their path in the boxes; None: the boxes run no
            programs.
    """

    def __init__(self, config: SandboxConfig, mounts: Mapping[str, str] | None = None) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._config = config
        self.runs_programs = mounts is not None
        self._servers = [Server(config, mounts) for _ in range(config.servers or cpus)]
        self.slots = asyncio.Semaphore(config.concurrency or 2 * cpus)
        self.grace_s = config.grace_s
        self._num_boxes = 0
        self._open: weakref.WeakSet[BubblewrapBox] = weakref.WeakSet()
        self._closed = False

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a new box, which the caller closes. Its first command starts its processes.

        Raises:
            BadInput: the spec asks for an image or a network, which these boxes lack.
            SandboxError: the pool is closed.
        """
        if spec.image != "python":
            raise refusal("box.image", "'python'", repr(spec.image), "use another kind of sandbox for images")
        if spec.network:
            raise refusal(
                "box.network", "false", "true", "bubblewrap boxes have no network; use another kind of sandbox"
            )
        if not self._config.enabled:
            return OffBox()
        if self._closed:
            raise SandboxError("sandbox: the pool is closed")
        return self.made(spec)

    def made(self, spec: BoxSpec, joined: tuple[int, ...] = ()) -> BubblewrapBox:
        """Return a box of the next server.

        Args:
            spec: limits of the box.
            joined: pipe ends for its first command; the box closes them.
        """
        server = self._servers[self._num_boxes % len(self._servers)]
        self._num_boxes += 1
        box = BubblewrapBox(self, spec, server, joined)
        self._open.add(box)
        return box

    async def close(self) -> None:
        self._closed = True
        for box in list(self._open):
            await box.close()
        for server in self._servers:
            server.close()


class BubblewrapBox:
    """Box of one fork server. Its commands run at once, but while its caller reads or writes files no new one begins;
    cancelling the awaiting task kills the command. Implements `Sandbox`.

    `output_bytes` of the spec applies to stdout and stderr separately, so the kept output does not depend on how they
    interleave.

    Attributes:
        queued_s: seconds that its commands have waited for their turn and a slot of the pool.
    """

    def __init__(self, pool: BubblewrapBoxes, spec: BoxSpec, server: Server, joined: tuple[int, ...] = ()) -> None:
        self._pool = pool
        self._spec = spec
        self._server = server
        self._joined = joined
        self._turn = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._connection: BoxConnection | None = None
        self.queued_s = 0.0
        self._used = False
        self._end_reason: str | None = None

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
    ) -> ExecResult:
        """Run a program, or a text of sh, in /box or another folder of the box. The exit code is a shell's: 126, 127,
        or 128 + n after signal n. What it leaves running ends with it.

        Raises:
            FileNotFoundError: there is no folder `cwd`.
            SpoiltFile: a command of this box left something else there, or took permission away.
            SandboxError: the box failed.
        """
        self._used = True
        request = {"op": "exec", **_placed(argv, cwd, environment)}
        return await self._turned(request, _bytes(stdin), timeout_s, output_bytes, on_output)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run code as `python3 -c` would, in a fork of a warm interpreter."""
        self._used = True
        return await self._turned({"op": "python"}, _bytes(code), timeout_s)

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
            SandboxError: the box failed.
        """
        if not self._pool.runs_programs:
            raise refusal("sandbox", "boxes that run programs", "others", "make the pool with mounts")
        self._used = True
        request = {"op": "program", "argv": list(argv), "environment": dict(environment), "port": port}
        call, rest = await self._begin(request, _bytes(stdin), timeout_s, output_bytes)
        running = asyncio.create_task(self._ended(call, rest, timeout_s))
        serving = asyncio.create_task(_serve(call, served))
        try:
            await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not running.done():
                running.cancel()
                await asyncio.wait((running,))
                serving.result()
            return result_of(await running)
        except Refused as refused:
            raise PortTaken(refused.errno, f"port {port} of the box: {refused}") from refused
        finally:
            for task in (running, serving):
                task.cancel()
            await asyncio.gather(running, serving, return_exceptions=True)

    async def fresh(self) -> Sandbox:
        self._check_open()
        return await self._pool.take(self._spec)

    async def beside(self, spec: BoxSpec) -> Sandbox:
        """Return a box with another spec from the same pool. The caller closes it.

        Raises:
            BadInput: the pool cannot make such a box, see `take`.
            SandboxError: this box has failed, or it or the pool is closed.
        """
        self._check_open()
        return await self._pool.take(spec)

    async def converse(self, code: str, other: str) -> ExecResult:
        """Run two programs at once, each in a fresh box, joined by two pipes: each writes to file descriptor 201 and
        reads from 200. `other` has the time limit of the spec, `code` twice as much; the end of `code` ends `other`.
        Together they take one slot of the pool, since one of them usually waits.

        Returns:
            result of `code`.

        Raises:
            SandboxError: a box failed and `code` failed because of it, or this box is closed.
        """
        self._check_open()
        (questions, ask), (answers, answer) = os.pipe(), os.pipe()
        asking = self._pool.made(self._spec, (answers, ask))
        answering = self._pool.made(self._spec, (questions, answer))
        limit_s = self._spec.timeout_s
        answer_task: asyncio.Task[ExecResult] | None = None
        try:
            async with self._pool.slots:
                answer_task = asyncio.create_task(answering.run_alone(other, limit_s))
                result = await asking.run_alone(code, 2 * limit_s)
                if result.exit_code:  # the await below raises if the other box is the one that failed
                    answering.cancel()
                    await answer_task
                return result
        finally:
            if answer_task is not None:
                answer_task.cancel()
                await asyncio.gather(answer_task, return_exceptions=True)
            await asking.close()
            await answering.close()

    async def run_alone(self, code: str, limit_s: float) -> ExecResult:
        """Run Python code in an unused box for a caller that holds a slot."""
        try:
            return result_of(await self._run({"op": "python"}, _bytes(code), limit_s))
        finally:
            self._close_pipes()  # if the box did not start, the other one would wait for an answer

    def cancel(self) -> None:
        """End the commands that run, but not what was started to live on; their results are those of killed
        commands."""
        if self._connection is not None:
            self._connection.send({"id": 0, "op": "end"})

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return a file of the box; relative paths start at /box. Only regular files are read, without waiting. No new
        command begins meanwhile.

        Args:
            path: path of the file.
            most_bytes: maximum size of the file.

        Raises:
            FileNotFoundError: there is no such file.
            SpoiltFile: a command of this box left something else at the path (a pipe, a folder), a larger file, or one
                that cannot be read.
            OSError: error of open(2) in a box where no command has run.
            SandboxError: the box failed.
        """
        return await self._gather({"op": "read", "path": path, "most": most_bytes}, most_bytes)

    async def entries(self, path: str = ".") -> Mapping[str, EntryKind]:
        """Return the kind of each entry of a folder, without following links. Names that are not UTF-8 are as in
        `os.listdir`.

        Raises:
            FileNotFoundError: there is no such folder.
            SpoiltFile: a command of this box left something else at the path, made it unreadable, or left more names
                than fit into `MOST_BYTES`.
            OSError: error of scandir(2) in a box where no command has run.
            SandboxError: the box failed.
        """
        body = await self._gather({"op": "list", "path": path}, MOST_BYTES)
        pairs = (entry.partition(b" ") for entry in body.split(b"\0")[:-1])
        return {os.fsdecode(name): cast(EntryKind, kind.decode()) for kind, _, name in pairs}

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the box and create its folders. The file appears once it is complete; until then, and after a
        failure, the old content stays.

        Raises:
            SpoiltFile: a command of this box prevents it: the path is not a file, a folder cannot be written, or the
                disk is full.
            OSError: error that no command can have caused: a read-only place, or no command has run.
            SandboxError: the box failed.
        """
        async with self._turn:
            header, _ = await self._command({"op": "write", "path": path, "size": len(data)}, data, FILE_TIMEOUT_S)
        raise_for(header, path, self._used)

    async def close(self) -> None:
        self._end_reason = self._end_reason or "the box is closed"
        self._close_pipes()
        if self._connection is not None:
            self._connection.end("the box is closed")

    async def _gather(self, request: dict[str, Any], most_bytes: int) -> bytes:
        """Return what a file operation writes, at most `most_bytes`."""
        data = io.BytesIO()

        def sink(call: Call, _: str, piece: bytes) -> None:
            if data.tell() <= most_bytes:
                data.write(piece)
            connection.tell(call, "credit", bytes=len(piece))

        async with self._turn:
            connection = await self._open()
            header, _ = await self._command(request, b"", FILE_TIMEOUT_S, 0, sink)
        if data.tell() > most_bytes:
            header = {**header, "exit": errno.EFBIG}
        raise_for(header, request["path"], self._used, most_bytes)
        return data.getvalue()

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
        if number := told.header["folder"]:
            raise_for({**told.header, "exit": number}, request["cwd"], self._used)
        return result_of(told)

    async def _command(
        self,
        request: dict[str, Any],
        body: bytes,
        timeout_s: float | None,
        output_bytes: int | None = None,
        sink: Sink | None = None,
    ) -> Told:
        """Run a command in a slot of the pool."""
        limit_s = self._spec.timeout_s if timeout_s is None else timeout_s
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._pool.slots:
            self.queued_s += clock() - began
            return await self._run(request, body, limit_s, output_bytes, sink)

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
        try:
            return await self._ended(call, rest, limit_s)
        except Refused as refused:
            raise SandboxError(f"sandbox: the box begins no more commands: {refused}") from refused

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
            "output": self._spec.output_bytes if output_bytes is None else output_bytes,
            "input_ends": len(body) <= inline and not request.get("kept"),
            "credit": None if sink is None else WINDOW_BYTES,
        }
        return connection.ask(request, body[:inline], sink), body[inline:]

    async def _ended(self, call: Call, rest: bytes, limit_s: float) -> Told:
        """Return the end of a command, which is fed the `rest` of its standard input."""
        assert self._connection is not None
        feeding = asyncio.create_task(self._connection.feed(call, rest, ends=True)) if rest else None
        try:
            async with asyncio.timeout(limit_s + self._pool.grace_s):
                return await call.told
        except asyncio.CancelledError:
            self._connection.tell(call, "end")
            self._connection.forget(call)
            raise
        except TimeoutError as error:
            why = f"no answer {self._pool.grace_s} s after the command's time limit"
            self._connection.end(why)
            raise SandboxError(f"sandbox: box failed: {why}") from error
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise SandboxError(f"sandbox: {self._end_reason}")

    async def _open(self) -> BoxConnection:
        """Return the box's connection; start the box first if it has none."""
        async with self._opening:
            self._check_open()
            if self._connection is None:
                self._connection = BoxConnection(await self._server.connect(self._joined), self._note_end)
                self._close_pipes()
                spec = self._spec
                limits = {"memory": spec.memory_bytes, "disk": spec.disk_bytes, "processes": spec.processes}
                self._connection.send(limits | {"files": PROGRAM_FILES if self._pool.runs_programs else FILES})
            return self._connection

    def _note_end(self, why: str) -> str:
        self._end_reason = self._end_reason or f"{why}{self._server.last_words()}"
        return self._end_reason

    def _close_pipes(self) -> None:
        for file in self._joined:
            os.close(file)
        self._joined = ()


async def _serve(call: Call, served: Callable[[socket.socket], Awaitable[None]]) -> None:
    await served(await call.socket)


def _placed(argv: Sequence[str] | str, cwd: str | None, environment: Mapping[str, str] | None) -> dict[str, Any]:
    """Return what a request says of a command's line, folder and variables."""
    placed: dict[str, Any] = {"argv": ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)}
    if cwd is not None:
        placed["cwd"] = cwd
    return placed if environment is None else {**placed, "environment": dict(environment)}


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
