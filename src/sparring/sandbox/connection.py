"""Parent's end of a box's socket: frames of many commands at once, with credit. `inner.wire` describes the frames."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from sparring.errors import SandboxError
from sparring.protocols import OnOutput
from sparring.sandbox.fault import BoxRequest
from sparring.sandbox.snapshots import FrozenLayer

WINDOW_BYTES = 1 << 20
"""Maximum number of bytes on their way in each direction, per command."""
PIECE_BYTES = 1 << 18
RECEIVED_BYTES = 1 << 18
MOST_FILES = 253


class Told(NamedTuple):
    """Report on a command's end, or on its output so far: header, then head and tail of stdout and of stderr."""

    header: Mapping[str, Any]
    parts: tuple[bytes, ...]


class Passed(NamedTuple):
    """Frozen layers that a box sent, lowest first, and the header of their frame."""

    layers: tuple[FrozenLayer, ...]
    header: Mapping[str, Any]


class Call:
    """Numbered request to a box, with futures for the answers.

    Attributes:
        asked: the request, from which errors are built.
        told: the box's report of the command's end.
        begun: done once a long-running command is confined.
        closed: done once the box has forgotten the request.
        socket: socket that the box sent.
        layers: frozen layers that the box sent.
        looks: reports of the output so far, one for each request for it.
        answers: reports of the ends of a shell's texts, by number; number 0: the shell is ready.
    """

    def __init__(self, number: int, asked: BoxRequest, sink: Sink | None) -> None:
        loop = asyncio.get_running_loop()
        self.number, self.asked, self.sink = number, asked, sink
        self.told: asyncio.Future[Told] = loop.create_future()
        self.begun: asyncio.Future[Any] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.socket: asyncio.Future[socket.socket] = loop.create_future()
        self.layers: asyncio.Future[Passed] = loop.create_future()
        self.looks: deque[asyncio.Future[Told]] = deque()
        self.answers: dict[int, asyncio.Future[Told]] = {0: loop.create_future()}
        self.on_the_way = 0
        self.room = asyncio.Event()
        self.room.set()

    def fail(self, error: Exception) -> None:
        """Fail all futures of this request."""
        waits: list[asyncio.Future[Any]] = [self.told, self.begun, self.closed, self.socket, self.layers, *self.looks]
        waits += self.answers.values()
        for future in waits:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it may be that nobody asks
        self.room.set()

    def close_socket(self) -> None:
        """Close the socket that the box sent, if it sent one."""
        if self.socket.done() and not self.socket.cancelled() and self.socket.exception() is None:
            self.socket.result().close()

    def taken(self, count: int) -> None:
        """Note that the box has passed `count` bytes of input on."""
        self.on_the_way -= count
        if self.on_the_way < WINDOW_BYTES:
            self.room.set()


Sink = Callable[[Call, str, bytes], None]
"""Function that gets the pieces of a command's output: the command, "stdout" or "stderr", the piece."""


class BoxConnection:
    """Socket of one box. A frame that belongs to no pending request is dropped.

    Args:
        on_end: called once with the reason when the box has ended or reports an error; returns the full reason.
        on_told: called with the header of each command's end; returns the header to use.
        is_used: returns whether the policy may be the cause of an error.
    """

    def __init__(
        self,
        link: socket.socket,
        on_end: Callable[[str], str],
        on_told: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        is_used: Callable[[], bool],
    ) -> None:
        link.setblocking(False)
        self._link, self._on_end, self._on_told, self._is_used = link, on_end, on_told, is_used
        self._loop = asyncio.get_running_loop()
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._files: deque[int] = deque()
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._failure: SandboxError | None = None
        self._loop.add_reader(link, self._receive)

    def ask(self, request: Mapping[str, Any], body: bytes = b"", sink: Sink | None = None) -> Call:
        """Send a new request. `sink` gets the pieces of its output."""
        self._number += 1
        asked = BoxRequest(request, self._is_used(), bool(self._calls))
        call = self._calls[self._number] = Call(self._number, asked, sink)
        self.send({**request, "id": call.number}, body)
        if self._failure is not None:  # it has ended before it was asked
            call.fail(self._failure)
        return call

    def tell(self, call: Call, op: str, body: bytes = b"", /, **more: Any) -> None:
        """Send a further message about a request."""
        self.send({"id": call.number, "op": op, **more}, body)

    async def feed(self, call: Call, data: bytes, *, ends: bool, patience_s: float | None = None) -> None:
        """Send input as fast as the box takes it; stop when the command has ended.

        Raises:
            TimeoutError: the command takes nothing for `patience_s` seconds.
            SandboxError: the box failed.
        """
        rest = memoryview(data)
        while not call.told.done():
            piece, rest = bytes(rest[:PIECE_BYTES]), rest[PIECE_BYTES:]
            call.on_the_way += len(piece)
            self.tell(call, "input", piece, ends=ends and not rest)
            if not rest:
                return
            if call.on_the_way >= WINDOW_BYTES:
                call.room.clear()
                await asyncio.wait_for(call.room.wait(), patience_s)

    def forget(self, call: Call) -> None:
        """Ignore further frames for a request."""
        self._calls.pop(call.number, None)

    def give_up(self, call: Call) -> None:
        """End a command for which nobody waits any more."""
        self.tell(call, "end")
        self.forget(call)

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a frame; keep the bytes that the box does not take yet."""
        if self._link.fileno() < 0:
            return
        text = json.dumps(header).encode()
        head, rest = struct.pack("<II", len(text), len(body)) + text, memoryview(body)
        waits = bool(self._out)
        self._out.extend(part for part in (memoryview(head), rest) if part)
        if not waits:
            self._flush()
            if self._out:
                self._loop.add_writer(self._link, self._flush_on)

    def _flush(self) -> None:
        try:
            while self._out:
                count = self._link.send(self._out[0])
                self._out[0] = self._out[0][count:]
                if not self._out[0]:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the reader hears of it

    def _flush_on(self) -> None:
        self._flush()
        if not self._out:
            self._loop.remove_writer(self._link)

    def _receive(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._link, RECEIVED_BYTES, MOST_FILES)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        self._files.extend(files)
        if not data:
            self.end("its process has ended")
            return
        self._in += data
        at = 0
        while len(self._in) - at >= 8:
            sizes = struct.unpack_from("<II", self._in, at)
            if len(self._in) - at < 8 + sum(sizes):
                break
            middle, end = at + 8 + sizes[0], at + 8 + sum(sizes)
            header = json.loads(self._in[at + 8 : middle])
            body = bytes(memoryview(self._in)[middle:end])
            at = end
            self._dispatch(header, body)
        del self._in[:at]

    def _dispatch(self, header: Mapping[str, Any], body: bytes) -> None:
        if "broken" in header:
            self.end(header["broken"])
            return
        link = socket.socket(fileno=self._files.popleft()) if "socket" in header and self._files else None
        layers = tuple(FrozenLayer(self._files.popleft()) for _ in range(header.get("layers", 0)) if self._files)
        if len(layers) < header.get("layers", 0):  # the kernel drops descriptors for which there is no room
            self.end("frozen layers were lost, because this process has too many open files")
            return
        if "socket" in header and link is None:
            self.end("a socket was lost, because this process has too many open files")
            return
        call = self._calls.get(header["id"])
        if call is None:
            if link is not None:
                link.close()
            return
        if link is not None:
            call.socket.set_result(link) if not call.socket.done() else link.close()
        elif layers and not call.layers.done():
            call.layers.set_result(Passed(layers, header))
        elif "stream" in header:
            if call.sink is not None:
                call.sink(call, header["stream"], body)
        elif "taken" in header:
            call.taken(header["taken"])
        elif "begun" in header:
            call.begun.set_result(None)
        elif "refused" in header:
            self.forget(call)
            call.fail(call.asked.refusal(header))
        elif "parts" in header:
            self._tell_end(call, header, body)
        if header.get("closed"):
            self._calls.pop(call.number, None)
            if not call.closed.done():
                call.closed.set_result(None)
            call.fail(SandboxError("sandbox: the command is closed"))

    def _tell_end(self, call: Call, header: Mapping[str, Any], body: bytes) -> None:
        parts, at = [], 0
        for size in header["parts"]:
            parts.append(body[at : at + size])
            at += size
        told = Told(header if "look" in header else self._on_told(header), tuple(parts))
        waiting, error = call.told, None
        if "look" in header:
            waiting = call.looks.popleft()
        elif "call" in header:
            found = call.answers.pop(header["call"], None)
            if found is None:
                return
            waiting = found
        else:
            call.room.set()
            error = call.asked.error_in(told.header)
        if error is not None:
            call.fail(error)
        elif not waiting.done():
            waiting.set_result(told)

    def end(self, why: str) -> None:
        """Close the socket, and fail every pending request."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()
            for file in self._files:
                os.close(file)
            self._files.clear()
            self._failure = SandboxError(f"sandbox: box failed: {self._on_end(why)}")
            for call in self._calls.values():
                call.fail(self._failure)
            self._calls.clear()


class Pump:
    """Context in which the pieces of a command's output are passed to its caller's coroutine function, one after
    another. The box sends more as the function returns.

    Raises:
        Exception: exception of the coroutine function.
    """

    def __init__(self, connection: BoxConnection, on_output: OnOutput) -> None:
        self._connection, self._on_output = connection, on_output
        self._pieces: asyncio.Queue[tuple[Call, str, bytes] | None] = asyncio.Queue()

    def __call__(self, call: Call, stream: str, piece: bytes) -> None:
        """Take a piece."""
        self._pieces.put_nowait((call, stream, piece))

    async def __aenter__(self) -> Pump:
        self.task = asyncio.create_task(self._hand_on())
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def end(self) -> None:
        """Wait until all pieces are taken, after the last has come."""
        self._pieces.put_nowait(None)
        await self.task

    async def beside(self, command: Coroutine[Any, Any, Told]) -> Told:
        """Run a command, and return the box's report of its end once all pieces are taken."""
        running = asyncio.create_task(command)
        try:
            await asyncio.wait((running, self.task), return_when=asyncio.FIRST_COMPLETED)
            await self.end()
            return await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _hand_on(self) -> None:
        while (taken := await self._pieces.get()) is not None:
            call, stream, piece = taken
            await self._on_output(stream, piece)
            self._connection.tell(call, "credit", bytes=len(piece))
