"""Boxes made by bubblewrap fork servers: a few milliseconds each, no daemon. How: `inside`. What is isolated:
docs/sandbox.md."""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import os
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sparring.errors import SandboxError, SpoiltFile, refusal
from sparring.protocols import Sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.server import Server
from sparring.types import BoxSpec, ExecResult

FILES, PROGRAM_FILES = 256, 4096
"""Files that a process may have open, in a pool whose boxes run programs the second."""
FILE_TIMEOUT_S = 10.0  # for read and write, which are the caller's own and not the policy's


class BubblewrapBoxes:
    """Implements `Boxes`. Belongs to one event loop. Servers start with the first command, so making one costs
    nothing.

    Args:
        config: of the boxes.
        mounts: folders of the host that programs need, by their path in the boxes; None where no box runs programs.
    """

    def __init__(self, config: SandboxConfig, mounts: Mapping[str, str] | None = None) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._config = config
        self.runs_programs = mounts is not None
        self._servers = [Server(config, mounts) for _ in range(config.servers or cpus)]
        self.slots = asyncio.Semaphore(config.concurrency or 2 * cpus)
        self.grace_s = config.grace_s
        self._taken = 0
        self._open: weakref.WeakSet[BubblewrapBox] = weakref.WeakSet()
        self._closed = False

    async def take(self, spec: BoxSpec) -> Sandbox:
        """Return a box of its own for the caller, who closes it. Its processes are made at its first command.

        Raises:
            BadInput: the spec asks for an image or a network, which these boxes do not have.
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
            spec: its limits.
            joined: the pipe ends that its first command gets; they are the box's to close.
        """
        server = self._servers[self._taken % len(self._servers)]
        self._taken += 1
        box = BubblewrapBox(self, spec, server, joined)
        self._open.add(box)
        return box

    async def close(self) -> None:
        """End every box and all servers."""
        self._closed = True
        for box in list(self._open):
            await box.close()
        for server in self._servers:
            server.close()


class BubblewrapBox:
    """Implements `Sandbox`. Commands of one box run one after another; cancelling the awaiting task kills its command.

    `output_bytes` of the spec holds for stdout and for stderr each, so that what is kept never depends on how the two
    interleave.

    Attributes:
        queued_s: seconds that its commands have waited for their turn and for a place in the pool.
    """

    def __init__(self, pool: BubblewrapBoxes, spec: BoxSpec, server: Server, joined: tuple[int, ...] = ()) -> None:
        self._pool = pool
        self._spec = spec
        self._server = server
        self._joined = joined
        self._turn = asyncio.Lock()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._sizes: tuple[int, int] | None = None
        self._requests = 0
        self.queued_s = 0.0
        self._used = False
        self._over: str | None = None
        self._ports: socket.socket | None = None
        if pool.runs_programs and not joined:
            self._ports, remote = socket.socketpair()
            self._joined = (remote.detach(),)

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        """Run a program with /box as its folder. 126 and 127 as in a shell, 128 + n for one that signal n ended."""
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
        """Run a program that finds a server at one port of its own loopback and no other network. It has as much
        address space as it wants; its memory, processes, files and output are bounded as those of every command, and
        all that it started ends with it. It takes no place of the pool: others run while it waits for the model.

        Args:
            argv: the program and its arguments.
            environment: all of its environment.
            stdin: text of its standard input.
            port: of 127.0.0.1 in the box.
            timeout_s: after which it is killed.
            output_bytes: of its standard output and error each, that are returned.
            served: gets the socket that listens at the port, which is its to close, and serves it until it is
                cancelled, when the program has ended.

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
                self._turned(request, stdin.encode("utf-8", "surrogatepass"), timeout_s, output_bytes)
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
        """Receive the listening socket of a program and have it served."""
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
        """Return another box of the same spec, in which nothing has run. The caller closes it.

        Raises:
            SandboxError: this one has failed, or it or the pool is closed.
        """
        self._check_open()
        return await self._pool.take(self._spec)

    async def beside(self, spec: BoxSpec) -> Sandbox:
        """Return a box of another spec, of the same pool. The caller closes it.

        Raises:
            BadInput: as for the pool's `take`.
            SandboxError: this box has failed, or it or the pool is closed.
        """
        self._check_open()
        return await self._pool.take(spec)

    async def converse(self, code: str, other: str) -> ExecResult:
        """Run two programs at once, each in a fresh box of its own, joined by two pipes: what one writes to file
        descriptor 201, the other reads from 200. `other` has the time limit of the spec, `code` twice as long; when
        `code` ends, `other` is ended. The two count as one command, for as a rule one of them waits.

        Returns:
            what `code` did.

        Raises:
            SandboxError: a box failed and `code` with it, or this box is closed.
        """
        self._check_open()
        (questions, ask), (answers, answer) = os.pipe(), os.pipe()
        asking = self._pool.made(self._spec, (answers, ask))
        answering = self._pool.made(self._spec, (questions, answer))
        limit_s = self._spec.timeout_s
        beside: asyncio.Task[ExecResult] | None = None
        try:
            async with self._pool.slots:
                beside = asyncio.create_task(answering.run_alone(other, limit_s))
                result = await asking.run_alone(code, 2 * limit_s)
                if result.exit_code:  # whose failure it is, the other box knows
                    answering.cancel()
                    await beside
                return result
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)
            await asking.close()
            await answering.close()

    async def run_alone(self, code: str, limit_s: float) -> ExecResult:
        """Run Python code for a caller that already holds the slot, in a box that nothing else uses."""
        try:
            return _result(*await self._turned({"op": "python"}, code.encode("utf-8", "surrogatepass"), limit_s))
        finally:
            self._let_go()  # where no box was made, the other one would wait for an answer

    def cancel(self) -> None:
        """End the command that runs; it answers as one that was killed. Nothing happens where none does."""
        if self._connection is not None:
            _send(self._connection[1], {"op": "cancel"})

    async def read(self, path: str) -> bytes:
        """Return a file of the box; relative paths start at /box. Only plain files are read, and nothing is waited for.

        Raises:
            FileNotFoundError: there is none.
            SpoiltFile: a command of this box has left something else there (a pipe, a folder), or closed it.
            OSError: as open(2) says, in a box in which no command has run.
            SandboxError: the box failed.
        """
        header, body = await self._command({"op": "read", "path": path}, b"", FILE_TIMEOUT_S, self._spec.disk_bytes)
        _raise_for(header, path, self._used)
        return body[: header["stdout"]]

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the box, making its folders.

        Raises:
            SpoiltFile: a command of this box is in the way: something else than a file stands there, the folder is
                closed, the disk is full.
            OSError: as the box says, where no command can be the reason: a read-only place, or none has run.
            SandboxError: the box failed.
        """
        header, _ = await self._command({"op": "write", "path": path}, data, FILE_TIMEOUT_S)
        _raise_for(header, path, self._used)

    async def close(self) -> None:
        """End every process of the box and forget its files."""
        self._over = self._over or "the box is closed"
        self._let_go()
        if self._ports is not None:
            self._ports.close()
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _command(
        self, request: dict[str, Any], body: bytes, timeout_s: float | None, output_bytes: int | None = None
    ) -> tuple[Mapping[str, Any], bytes]:
        limit_s = self._spec.timeout_s if timeout_s is None else timeout_s
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self._turn, self._pool.slots:
            self.queued_s += clock() - began
            return await self._turned(request, body, limit_s, output_bytes)

    async def _turned(
        self, request: dict[str, Any], body: bytes, limit_s: float, output_bytes: int | None = None
    ) -> tuple[Mapping[str, Any], bytes]:
        """Run the command, whose turn it is."""
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
            raise await self._broken(f"no answer {self._pool.grace_s} s after the command's time limit") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise await self._broken(f"its process has ended{self._server.last_words()}") from error

    def _check_open(self) -> None:
        if self._over is not None:
            raise SandboxError(f"sandbox: {self._over}")

    async def _open(self) -> asyncio.StreamWriter:
        self._check_open()
        if self._connection is None:
            self._connection = await asyncio.open_connection(sock=await self._server.connect(self._joined))
            self._let_go()
            spec = self._spec
            limits = {"memory": spec.memory_bytes, "disk": spec.disk_bytes, "processes": spec.processes}
            limits["files"] = PROGRAM_FILES if self._pool.runs_programs else FILES
            _send(self._connection[1], limits)
        return self._connection[1]

    def _let_go(self) -> None:
        """Close the pipe ends: the box has its own."""
        for file in self._joined:
            os.close(file)
        self._joined = ()

    async def _answer(self, request_id: int) -> tuple[Mapping[str, Any], bytes]:
        """Return the answer to this request, past those of cancelled ones. Where it is cancelled itself, nothing read
        is lost."""
        while True:
            assert self._connection is not None
            reader = self._connection[0]
            if self._sizes is None:
                self._sizes = struct.unpack("<II", await reader.readexactly(8))
            frame = await reader.readexactly(sum(self._sizes))
            header, body = json.loads(frame[: self._sizes[0]]), frame[self._sizes[0] :]
            self._sizes = None
            if "broken" in header:
                raise await self._broken(header["broken"])
            if header["id"] == request_id:
                return header, body

    async def _broken(self, why: str) -> SandboxError:
        why = self._over or why
        await self.close()
        self._over = why
        return SandboxError(f"sandbox: box failed: {why}")


class OffBox:
    """Implements `Sandbox` for a tool host that is switched off: every command fails with a text and none with an
    exception."""

    async def exec(self, argv: Sequence[str], *, stdin: str = "", timeout_s: float | None = None) -> ExecResult:
        """Exit code 1 and an error text."""
        return ExecResult(exit_code=1, stdout="", stderr="error: the tool host is switched off\n", wall_s=0.0)

    async def python(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Exit code 1 and an error text."""
        return await self.exec(())

    async def fresh(self) -> Sandbox:
        """Return another that is off."""
        return OffBox()

    async def converse(self, code: str, other: str) -> ExecResult:
        """Exit code 1 and an error text."""
        return await self.exec(())

    async def read(self, path: str) -> bytes:
        """Raise FileNotFoundError: no file exists.

        Raises:
            FileNotFoundError: always.
        """
        raise FileNotFoundError(errno.ENOENT, "the tool host is switched off", path)

    async def write(self, path: str, data: bytes) -> None:
        """Drop the file: nothing is kept."""

    async def close(self) -> None:
        """Do nothing: there is nothing to end."""


def _send(writer: asyncio.StreamWriter, header: Mapping[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    writer.write(struct.pack("<II", len(text), len(body)) + text + body)


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
    """UTF-8 with replacement; a character that the byte limit cut in two is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)


class SpoiltByFolder(SpoiltFile, IsADirectoryError):
    """A folder stands in the file's place."""


class SpoiltByMode(SpoiltFile, PermissionError):
    """The file, or a folder on the way, is closed."""


SPOILT: Mapping[int, type[SpoiltFile]] = {
    errno.EISDIR: SpoiltByFolder,
    errno.EACCES: SpoiltByMode,
    errno.EPERM: SpoiltByMode,
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ENXIO, errno.ELOOP, errno.ENOSPC), SpoiltFile),
}
"""Errors that an earlier command of the policy can have caused. ENXIO: a pipe, a socket or a device; EEXIST: a file
stands at the path of a new folder. A missing file or a read-only path does not count."""


def _raise_for(header: Mapping[str, Any], path: str, used: bool) -> None:
    if header["timed_out"]:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
    if number := header["exit"]:
        raise (SPOILT.get(number, OSError) if used else OSError)(number, os.strerror(number), path)
