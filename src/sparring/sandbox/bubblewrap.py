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
from sparring.sandbox.commands import BoxCommands
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.connection import BoxConnection, Call, Pump, Refused, Sink
from sparring.sandbox.handles import BoxProcess, BoxShell, BoxTerminal
from sparring.sandbox.off_box import OffBox
from sparring.sandbox.results import result_of
from sparring.sandbox.screen import Screen
from sparring.sandbox.server import Server
from sparring.sandbox.spoilt import PortTaken, raise_for
from sparring.sandbox.trees import packed, unpacked
from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult, TreeEntry

TERMINAL_BYTES = 1 << 16  # of a terminal's output on their way
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


class BubblewrapBox(BoxCommands):
    """Box of one fork server. Its commands run at once, but while its caller reads or writes files no new one begins;
    cancelling the awaiting task kills the command. Implements `Sandbox`.

    `output_bytes` of the spec applies to stdout and stderr separately, so the kept output does not depend on how they
    interleave.

    Attributes:
        queued_s: seconds that its commands have waited for a slot of the pool.
    """

    _pool: BubblewrapBoxes

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

    async def start(
        self,
        argv: Sequence[str] | str,
        *,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        on_output: OnOutput | None = None,
    ) -> BoxProcess:
        """Start a program that runs beside others until it ends or is killed, at most `timeout_s` seconds. The loopback
        interface of the box is up from then on. It takes no slot of the pool.

        Raises:
            FileNotFoundError: there is no folder `cwd`.
            SpoiltFile: a command of this box left something else there.
            BadInput: `MOST_RUNS` of `inner.boxes` run already.
            SandboxError: the box failed.
        """
        pump = None if on_output is None else Pump(await self._open(), on_output)
        request = {"op": "start", **_placed(argv, cwd, environment)}
        process = BoxProcess(self, *await self._kept(request, timeout_s, output_bytes, pump))
        process.pump = pump
        if pump is not None:
            await pump.__aenter__()
        return process

    async def shell(self, *, cwd: str | None = None, environment: Mapping[str, str] | None = None) -> BoxShell:
        """Start a shell, bash where the box has it.

        Raises:
            Exception: as `start`.
        """
        request = {"op": "shell", **_placed((), cwd, environment)}
        shell = BoxShell(self, *await self._kept(request))
        await shell.begun()
        return shell

    async def terminal(
        self,
        argv: Sequence[str] | str,
        *,
        columns: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> BoxTerminal:
        """Start a program with a terminal.

        Raises:
            BadInput: a size that no terminal has, or the package pyte is missing.
            Exception: as `start`.
        """
        screen = Screen(columns, rows)
        early: list[bytes] = []
        see: list[Callable[[bytes], None]] = [early.append]
        size = {"columns": columns, "rows": rows, "credit": TERMINAL_BYTES}
        request = {"op": "terminal", **size, **_placed(argv, cwd, environment)}
        request["environment"] = {"TERM": "linux", **request.get("environment", {})}
        kept = await self._kept(request, sink=lambda _call, _name, piece: see[0](piece))
        terminal = BoxTerminal(self, *kept, screen)
        see[0] = terminal.see
        for piece in early:
            terminal.see(piece)
        return terminal

    async def connect(self, port: int) -> socket.socket:
        """Connect to a port that a program of the box listens at, on 127.0.0.1. The caller closes the socket.

        Raises:
            BadInput: no such port can be.
            ConnectionRefusedError: nothing listens there.
            OSError: the connection fails otherwise.
            SandboxError: the box failed.
        """
        if not 1 <= port <= 65535:
            raise refusal("port", "1 to 65535", repr(port), "name the port that the program listens at")
        connection = await self._open()
        call = connection.ask({"op": "connect", "port": port})
        try:
            return await self.soon(call.socket)
        except Refused as refused:
            raise OSError(refused.errno, f"port {port} of the box: {refused}") from refused
        finally:
            connection.forget(call)

    async def _kept(
        self,
        request: dict[str, Any],
        timeout_s: float | None = None,
        output_bytes: int | None = None,
        sink: Sink | None = None,
    ) -> tuple[BoxConnection, Call]:
        """Begin what lives on, once no file operation is under way."""
        self._used = True
        async with self._turn:
            pass
        call, _ = await self._begin({**request, "kept": True}, b"", timeout_s, output_bytes, sink)
        assert self._connection is not None
        try:
            await self.soon(call.begun, call.told)
        except Refused as refused:
            raise refusal("box", "room for one more command", str(refused), "close one that runs") from refused
        if call.told.done() and (number := call.told.result().header["folder"]):
            raise_for({**call.told.result().header, "exit": number}, request["cwd"], self._used)
        return self._connection, call

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

    async def upload(self, tree: Mapping[str, TreeEntry | bytes], path: str = ".") -> None:
        """Write a tree below a folder, which is made. A file that was there keeps its mode if the new one is not
        executable; each file appears whole.

        Raises:
            BadInput: a path that leads out of the tree.
            SpoiltFile: a command of this box is in the way.
            OSError: as for `write`.
            SandboxError: the box failed.
        """
        data = packed(tree)
        async with self._turn:
            header, _ = await self._command({"op": "unpack", "path": path}, data, FILE_TIMEOUT_S)
        raise_for(header, path, self._used)

    async def download(self, path: str = ".", most_bytes: int = MOST_BYTES) -> Mapping[str, TreeEntry]:
        """Return the tree below a folder, by the paths in it; links are not followed.

        Raises:
            FileNotFoundError: there is no such folder.
            SpoiltFile: a command of this box left more than `most_bytes`, with names, or made something unreadable.
            OSError: error in a box where no command has run.
            SandboxError: the box failed.
        """
        return unpacked(await self._gather({"op": "pack", "path": path, "most": most_bytes}, most_bytes))

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
