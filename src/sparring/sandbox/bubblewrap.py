"""Boxes made by bubblewrap fork servers, in a few milliseconds each and without a daemon. `inner.boxes` describes the
mechanism, docs/sandbox.md what is isolated."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, cast

from sparring.errors import SandboxError, refusal
from sparring.protocols import Sandbox, Snapshot
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.frames import result_of, send
from sparring.sandbox.off_box import OffBox
from sparring.sandbox.roots import LayersOf, Root, check_runs_programs, check_same_user, root_of, stored_layers
from sparring.sandbox.server import Server
from sparring.sandbox.snapshots import LayeredSnapshot, Line, check_judging, check_prepared, checked, lent, passed
from sparring.sandbox.spoilt import raise_for
from sparring.sandbox.verifier import checked_paths, conversation, pipes_between, verifier_of
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
        layers_of: finds the layers of an image by its name.
    """

    def __init__(
        self, config: SandboxConfig, mounts: Mapping[str, str] | None = None, layers_of: LayersOf = stored_layers
    ) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._config = config
        self.runs_programs = mounts is not None
        self._mounts = mounts
        self.layers_of = layers_of
        self._servers: dict[tuple[object, ...], list[Server]] = {}
        self._num_servers = config.servers or cpus
        self.slots = asyncio.Semaphore(config.concurrency or 2 * cpus)
        self.grace_s = config.grace_s
        self._num_boxes = 0
        self._open: weakref.WeakSet[BubblewrapBox] = weakref.WeakSet()
        self._closed = False

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a new box, which the caller closes. Its first command starts its processes.

        Raises:
            BadInput: there is no such image, the user is no id, or the spec asks for a network, which these boxes lack.
            SandboxError: the pool is closed.
        """
        if spec.network:
            raise refusal(
                "box.network", "false", "true", "bubblewrap boxes have no network; use another kind of sandbox"
            )
        root = root_of(spec, self.layers_of)
        if not self._config.enabled:
            return OffBox()
        return self.made(spec, root)

    def made(
        self, spec: BoxSpec, root: Root, joined: tuple[int, ...] = (), below: LayeredSnapshot | None = None
    ) -> BubblewrapBox:
        """Return a box of the next server.

        Args:
            spec: limits of the box.
            root: root of the box.
            joined: pipe ends for its first command; the box closes them.
            below: snapshot that the box is a fork of.

        Raises:
            SandboxError: the pool is closed.
        """
        if self._closed:
            raise SandboxError("sandbox: the pool is closed")
        kind = (root.kind == "host", *root.folders)
        if kind not in self._servers:
            self._servers[kind] = [Server(self._config, self._mounts, root) for _ in range(self._num_servers)]
        server = self._servers[kind][self._num_boxes % self._num_servers]
        self._num_boxes += 1
        box = BubblewrapBox(self, spec, root, server, joined, below)
        self._open.add(box)
        return box

    async def close(self) -> None:
        self._closed = True
        for box in list(self._open):
            await box.close()
        for server in chain.from_iterable(self._servers.values()):
            server.close()


class BubblewrapBox:
    """Box of one fork server. Its commands run one after another; cancelling the awaiting task kills the command.
    Implements `Sandbox`.

    `output_bytes` of the spec applies to stdout and stderr separately, so the kept output does not depend on how they
    interleave.

    Attributes:
        queued_s: seconds that its commands have waited for their turn and a slot of the pool.
    """

    def __init__(
        self,
        pool: BubblewrapBoxes,
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
        self._passing, remote = socket.socketpair()
        self._passing.setblocking(False)
        self._joined = (remote.detach(), *joined)
        self._line = Line(spec, below)
        self._turn = asyncio.Lock()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._sizes: tuple[int, int] | None = None
        self._header: Mapping[str, Any] | None = None
        self._body = io.BytesIO()
        self._requests = 0
        self.queued_s = 0.0
        self._used = self._line.used
        self._end_reason: str | None = None

    async def exec(
        self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None, user: int | None = None
    ) -> ExecResult:
        """Run a program in the folder /box. The exit code is a shell's: 126, 127, or 128 + n after signal n.

        Raises:
            BadInput: the user is not the box's: a box has one.
        """
        check_same_user(self.spec, user)
        self._used = True
        body = stdin.encode("utf-8", "surrogatepass")
        return result_of(*await self._command({"op": "exec", "argv": list(argv)}, body, timeout_s))

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run code as `python3 -c` would, in a fork of a warm interpreter; in an image, by the image's `python3`."""
        if self._root.kind == "layers":
            return await self.exec(["python3", "-"], stdin=code, timeout_s=timeout_s)
        self._used = True
        return result_of(*await self._command({"op": "python"}, code.encode("utf-8", "surrogatepass"), timeout_s))

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
            BadInput: the pool runs no programs, or the box has an image of its own.
            SandboxError: the box failed.
        """
        check_runs_programs(self._pool.runs_programs, self.spec, self._root)
        self._used = True
        request = {"op": "program", "argv": list(argv), "environment": dict(environment), "port": port}
        async with self._turn:
            running = asyncio.create_task(
                self._run_command(request, stdin.encode("utf-8", "surrogatepass"), timeout_s, output_bytes)
            )
            serving = asyncio.create_task(self._serve(served))
            try:
                await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    running.cancel()
                    await asyncio.wait((running,))
                    serving.result()
                return result_of(*await running)
            finally:
                for task in (running, serving):
                    task.cancel()
                await asyncio.gather(running, serving, return_exceptions=True)

    async def _serve(self, served: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Receive a program's listening socket, and serve it."""
        (file,) = await passed(self._passing, 1)
        await served(socket.socket(fileno=file))

    async def snapshot(self) -> LayeredSnapshot:
        """Freeze the box's files, and return them as what other boxes are forks of. Nothing is copied: the box goes on
        in a new layer on top.

        Raises:
            BadInput: the box has too many layers.
            SandboxError: the box is closed or failed.
        """
        self._line.check()
        async with self._turn_and_slot():
            header, _ = await self._run_command({"op": "snapshot"}, b"", FILE_TIMEOUT_S)
            (file,) = await self._passed(1)
            return self._line.add(file, header["processes"], self._used)

    async def fork(self, snapshot: Snapshot) -> BubblewrapBox:
        """Return a new box with the files, the working folder and the environment of a snapshot. The caller closes it.
        The snapshot's box may be closed.

        Raises:
            BadInput: the snapshot is not of these boxes.
            SandboxError: the pool is closed.
        """
        state = checked(snapshot)
        return self._pool.made(state.spec, root_of(state.spec, self._pool.layers_of), below=state)

    async def verifier(self, paths: Sequence[str], most_bytes: int = MOST_BYTES) -> Sandbox:
        """Return a box in which nothing but files of these names comes from this one: a fork of this box's first
        snapshot, or of this one where no command has run in it. The caller closes it.

        `converse` in it runs `code` without the files, and `other` with them.

        Args:
            paths: files; relative paths start at /box. One that is missing here is missing there.
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
        judging = self._pool.made(self.spec, self._root, below=self._line.prepared)
        judging._line.judge = (self._line.prepared,)
        return await verifier_of(self, judging, names, most_bytes)

    async def fresh(self) -> Sandbox:
        self._check_open()
        return await self._pool.take(self.spec)

    async def beside(self, spec: BoxSpec) -> Sandbox:
        """Return a box with another spec from the same pool, as `take` does. The caller closes it."""
        self._check_open()
        return await self._pool.take(spec)

    async def converse(self, code: str, other: str) -> ExecResult:
        """Return the result of `code`, which runs at once with `other`, each in a box of its own: a fresh one, or in a
        verifier a fork, `code` without the policy's files and `other` with them. Two pipes join them: each writes to
        file descriptor 201 and reads from 200. `other` has the time limit of the spec, `code` twice as much; the end of
        `code` ends `other`. Together they take one slot of the pool, since one of them usually waits.

        Raises:
            BadInput: the box has an image of its own, on whose programs a judge must not run.
            SandboxError: a box failed and `code` failed because of it, or this box is closed.
        """
        self._check_open()
        check_judging(self.spec.image, self._root.kind)
        judge = self._line.judge
        below = (*judge, await self.snapshot()) if judge else (None, None)
        ends = zip(pipes_between(), below, strict=True)
        asking, answering = (self._pool.made(self.spec, self._root, *end) for end in ends)
        return await conversation((asking, code), (answering, other), self.spec.timeout_s, self._pool.slots)

    async def run_alone(self, code: str, limit_s: float) -> ExecResult:
        """Run Python code in an unused box for a caller that holds a slot."""
        try:
            return result_of(*await self._run_command({"op": "python"}, code.encode("utf-8", "surrogatepass"), limit_s))
        finally:
            self._close_pipes()  # if the box did not start, the other one would wait for an answer

    def cancel(self) -> None:
        """End the running command, if there is one; its result is that of a killed command."""
        if self._connection is not None:
            send(self._connection[1], {"op": "cancel"})

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
        return await self._read({"op": "read", "path": path, "most": most_bytes}, self._used)

    async def read_plain(self, path: str, most_bytes: int) -> bytes:
        """Return a file as `read` does, but refuse links, also in its folders, and take every error for a command's
        doing."""
        return await self._read({"op": "read", "path": path, "most": most_bytes, "plain": True}, True)

    async def _read(self, request: dict[str, Any], used: bool) -> bytes:
        path, most_bytes, pieces, size = request["path"], request["most"], io.BytesIO(), 0
        async with self._turn_and_slot():  # no command may run between two pieces
            while True:
                offset = {"offset": size}
                header, piece = await self._run_command(request | offset, b"", FILE_TIMEOUT_S, READ_PIECE_BYTES)
                raise_for(header, path, used, most_bytes)
                size += pieces.write(piece)
                if size > most_bytes:  # such as a file of /proc, which does not report its size
                    raise_for({**header, "exit": errno.EFBIG}, path, used, most_bytes)
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

    async def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        await self._command({"op": "remove", "path": path}, b"", FILE_TIMEOUT_S)

    async def close(self) -> None:
        self._end_reason = self._end_reason or "the box is closed"
        self._close_pipes()
        self._passing.close()
        self._line.layers = ()
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _command(
        self, request: dict[str, Any], body: bytes, timeout_s: float | None, output_bytes: int | None = None
    ) -> tuple[Mapping[str, Any], bytes]:
        limit_s = self.spec.timeout_s if timeout_s is None else timeout_s
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
            "output": self.spec.output_bytes if output_bytes is None else output_bytes,
        }
        try:
            writer = await self._open()
            send(writer, request, body)
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
            async with lent(self._line.layers) as frozen:
                self._connection = await asyncio.open_connection(sock=await self._server.connect(self._joined, frozen))
                self._close_pipes()
                send(self._connection[1], self._limits())
                for layer, file in zip(self._line.layers, await self._passed(len(frozen)), strict=True):
                    layer.replace(file)
        return self._connection[1]

    def _limits(self) -> dict[str, Any]:
        """Return what the box is told when it starts."""
        spec = self.spec
        limits = {"memory": spec.memory_bytes, "disk": spec.disk_bytes, "processes": spec.processes, "user": spec.user}
        limits["files"] = PROGRAM_FILES if self._pool.runs_programs else FILES
        return {**limits, **self._root.limits(), **self._line.limits()}

    async def _passed(self, count: int) -> list[int]:
        """Receive descriptors from the box.

        Raises:
            SandboxError: it failed before it passed them.
        """
        try:
            async with asyncio.timeout(self._pool.grace_s):
                return await passed(self._passing, count)
        except (TimeoutError, SandboxError):
            await self._answer(0)  # raises what the box said of its failure
            raise

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
