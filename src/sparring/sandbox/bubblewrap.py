"""Boxes made by bubblewrap fork servers, in a few milliseconds each and without a daemon. `inner.boxes` describes the
mechanism, docs/sandbox.md what is isolated."""

from __future__ import annotations

import asyncio
import codecs
import errno
import io
import json
import os
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from sparring.errors import SandboxError, refusal
from sparring.protocols import Sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.off_box import OffBox
from sparring.sandbox.server import Server
from sparring.sandbox.spoilt import raise_for
from sparring.types import MOST_BYTES, BoxSpec, EntryKind, ExecResult

FILES, PROGRAM_FILES = 256, 4096
"""Maximum number of open files of a process: `PROGRAM_FILES` in a pool of boxes that run programs, `FILES` in any
other."""
READ_PIECE_BYTES = 4 << 20
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
    """Box of one fork server. Its commands run one after another; cancelling the awaiting task kills the command.
    Implements `Sandbox`.

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
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._sizes: tuple[int, int] | None = None
        self._header: Mapping[str, Any] | None = None
        self._body = io.BytesIO()
        self._requests = 0
        self.queued_s = 0.0
        self._used = False
        self._end_reason: str | None = None
        self._ports: socket.socket | None = None
        if pool.runs_programs and not joined:
            self._ports, remote = socket.socketpair()
            self._joined = (remote.detach(),)

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        """Run a program in the folder /box. The exit code is a shell's: 126, 127, or 128 + n after signal n."""
        self._used = True
        body = stdin.encode("utf-8", "surrogatepass")
        return _result(*await self._command({"op": "exec", "argv": list(argv)}, body, timeout_s))

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run code as `python3 -c` would, in a fork of a warm interpreter."""
        self._used = True
        return _result(*await self._command({"op": "python"}, code.encode("utf-8", "surrogatepass"), timeout_s))

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
            SandboxError: the box failed.
        """
        if self._ports is None:
            raise refusal("sandbox", "boxes that run programs", "others", "make the pool with mounts")
        self._used = True
        request = {"op": "program", "argv": list(argv), "environment": dict(environment), "port": port}
        async with self._turn:
            running = asyncio.create_task(
                self._run_command(request, stdin.encode("utf-8", "surrogatepass"), timeout_s, output_bytes)
            )
            serving = asyncio.create_task(self._serve(self._ports, served))
            try:
                await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    running.cancel()
                    await asyncio.wait((running,))
                    serving.result()
                return _result(*await running)
            finally:
                for task in (running, serving):
                    task.cancel()
                await asyncio.gather(running, serving, return_exceptions=True)

    async def _serve(self, ports: socket.socket, served: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Receive a program's listening socket, and serve it."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(ports, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(ports)
        _, files, _, _ = socket.recv_fds(ports, 1, 1)
        if not files:
            raise SandboxError("sandbox: the box has ended")
        await served(socket.socket(fileno=files[0]))

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
            return _result(*await self._run_command({"op": "python"}, code.encode("utf-8", "surrogatepass"), limit_s))
        finally:
            self._close_pipes()  # if the box did not start, the other one would wait for an answer

    def cancel(self) -> None:
        """End the running command, if there is one; its result is that of a killed command."""
        if self._connection is not None:
            _send(self._connection[1], {"op": "cancel"})

    async def read(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return a file of the box; relative paths start at /box. Only regular files are read, without waiting. The
        file is transferred in pieces, so the box holds one piece at a time.

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
        pieces, size = io.BytesIO(), 0
        async with self._turn_and_slot():  # no command may run between two pieces
            while True:
                request = {"op": "read", "path": path, "offset": size, "most": most_bytes}
                header, piece = await self._run_command(request, b"", FILE_TIMEOUT_S, READ_PIECE_BYTES)
                raise_for(header, path, self._used, most_bytes)
                size += pieces.write(piece)
                if size > most_bytes:  # such as a file of /proc, which does not report its size
                    raise_for({**header, "exit": errno.EFBIG}, path, self._used, most_bytes)
                if len(piece) < READ_PIECE_BYTES:
                    return pieces.getvalue()

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
        header, body = await self._command({"op": "list", "path": path}, b"", FILE_TIMEOUT_S, MOST_BYTES)
        if header["truncated"]:
            header = {**header, "exit": errno.EFBIG}
        raise_for(header, path, self._used, MOST_BYTES)
        pairs = (entry.partition(b" ") for entry in body[: header["stdout"]].split(b"\0")[:-1])
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
        header, _ = await self._command({"op": "write", "path": path, "size": len(data)}, data, FILE_TIMEOUT_S)
        raise_for(header, path, self._used)

    async def close(self) -> None:
        self._end_reason = self._end_reason or "the box is closed"
        self._close_pipes()
        if self._ports is not None:
            self._ports.close()
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _command(
        self, request: dict[str, Any], body: bytes, timeout_s: float | None, output_bytes: int | None = None
    ) -> tuple[Mapping[str, Any], bytes]:
        limit_s = self._spec.timeout_s if timeout_s is None else timeout_s
        async with self._turn_and_slot():
            return await self._run_command(request, body, limit_s, output_bytes)

    @asynccontextmanager
    async def _turn_and_slot(self) -> AsyncIterator[None]:
        """Wait for this box's turn and a slot of the pool, and hold both."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._turn, self._pool.slots:
            self.queued_s += clock() - began
            yield

    async def _run_command(
        self, request: dict[str, Any], body: bytes, limit_s: float, output_bytes: int | None = None
    ) -> tuple[Mapping[str, Any], bytes]:
        """Run a command whose turn it is."""
        self._requests += 1
        request |= {
            "id": self._requests,
            "timeout": limit_s,
            "output": self._spec.output_bytes if output_bytes is None else output_bytes,
        }
        try:
            writer = await self._open()
            _send(writer, request, body)
            async with asyncio.timeout(limit_s + self._pool.grace_s):
                return await self._answer(request["id"])
        except asyncio.CancelledError:
            self.cancel()
            raise
        except TimeoutError as error:
            raise await self._failure(f"no answer {self._pool.grace_s} s after the command's time limit") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise await self._failure(f"its process has ended{self._server.last_words()}") from error

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise SandboxError(f"sandbox: {self._end_reason}")

    async def _open(self) -> asyncio.StreamWriter:
        self._check_open()
        if self._connection is None:
            self._connection = await asyncio.open_connection(sock=await self._server.connect(self._joined))
            self._close_pipes()
            spec = self._spec
            limits = {"memory": spec.memory_bytes, "disk": spec.disk_bytes, "processes": spec.processes}
            limits["files"] = PROGRAM_FILES if self._pool.runs_programs else FILES
            _send(self._connection[1], limits)
        return self._connection[1]

    def _close_pipes(self) -> None:
        for file in self._joined:
            os.close(file)
        self._joined = ()

    async def _answer(self, request_id: int) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer to this request, skipping answers to cancelled ones. Cancelling this call loses no data."""
        while True:
            assert self._connection is not None
            reader = self._connection[0]
            if self._sizes is None:
                self._sizes = struct.unpack("<II", await reader.readexactly(8))
            if self._header is None:
                self._header = json.loads(await reader.readexactly(self._sizes[0]))
            while (missing := self._sizes[1] - self._body.tell()) > 0:  # read into one buffer, whatever the size
                piece = await reader.read(min(missing, READ_PIECE_BYTES))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", missing)
                self._body.write(piece)
            header, body = self._header, self._body.getvalue()
            self._sizes, self._header, self._body = None, None, io.BytesIO()
            if "broken" in header:
                raise await self._failure(header["broken"])
            if header["id"] == request_id:
                return header, body

    async def _failure(self, why: str) -> SandboxError:
        why = self._end_reason or why
        await self.close()
        self._end_reason = why
        return SandboxError(f"sandbox: box failed: {why}")


def _send(writer: asyncio.StreamWriter, header: Mapping[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    writer.write(struct.pack("<II", len(text), len(body)) + text)
    writer.write(body)


def _result(header: Mapping[str, Any], body: bytes) -> ExecResult:
    split = header["stdout"]
    return ExecResult(
        exit_code=header["exit"],
        stdout=_text(body[:split], cut=header["truncated"]),
        stderr=_text(body[split:], cut=header["truncated"]),
        wall_s=header["wall"],
        timed_out=header["timed_out"],
        out_of_memory=header["out_of_memory"],
        truncated=header["truncated"],
    )


def _text(data: bytes, *, cut: bool) -> str:
    """Decode UTF-8 with replacement; drop a character that the byte limit cut in two."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)
