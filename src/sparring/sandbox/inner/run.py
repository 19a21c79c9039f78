"""A command as the box sees it: its reaper, its streams, its clock, its output so far. Standard library only, for
Python >= 3.9."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

from sparring.sandbox.inner.command import ARMED, ENDED, GOOD_PART, NO_FOLDER, OUT_OF_MEMORY, STATUS, command, reap
from sparring.sandbox.inner.processes import own_bytes
from sparring.sandbox.inner.wire import PIECE_BYTES

POLL_S = 0.02
SLOW_POLL_S = 0.2  # what runs for minutes, with many threads or idle: a poll costs more and may be rarer
DISK = "/box"
STREAMS = ("stdout", "stderr")


class Output:
    """Head and tail of a stream, of at most `most` bytes together."""

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most_tail = most // 2
        self._most_head = most - self._most_tail
        self._head, self._tail = bytearray(), bytearray()

    def add(self, piece: bytes) -> None:
        """Add a piece, and keep the bytes that fit."""
        self.total += len(piece)
        room = self._most_head - len(self._head)
        self._head += piece[:room]
        self._tail += piece[max(0, room) :]
        if len(self._tail) > self._most_tail + PIECE_BYTES:
            del self._tail[: len(self._tail) - self._most_tail]

    def kept(self) -> tuple[bytes, bytes]:
        """Return head and tail."""
        return bytes(self._head), bytes(self._tail[max(0, len(self._tail) - self._most_tail) :])


class Run:
    """Running command.

    Args:
        body: code, or standard input.
        reaped: whether the command has a reaper; if not, pid 1 itself reaps.

    Attributes:
        kept: whether the command's processes live on after its own end, until the parent closes it.
        pid: process id of the reaper, or of the command itself if it has no reaper.
        armed: whether the command is confined.
        ending: descriptor that can be read when the command may have ended.
        result: header of the report to the parent on the command's end; None before the end.
        credit: bytes of output that the parent still takes; None if it takes none before the end.
    """

    def __init__(self, request: dict[str, Any], body: bytes, limits: dict[str, Any], reaped: bool) -> None:
        self.id = request["id"]
        self.report = self.ending = -1
        self.kept = request.get("kept", False)
        self.limits, self.op = limits, request["op"]
        self.started = time.monotonic()
        self.deadline = None if request["timeout"] is None else self.started + request["timeout"]
        self.poll_s = SLOW_POLL_S if self.kept or self.op == "program" else POLL_S
        self.credit = request.get("credit")
        self.outputs = {name: Output(request["output"]) for name in STREAMS}
        self.limit = ""
        self.result: dict[str, Any] | None = None
        self.code: int | None = None
        self.armed, self._said, self._peak_bytes, self.folder_error = False, b"", 0, 0
        self.input = memoryview(b"" if self.op == "python" else body)
        self.input_ends = request.get("input_ends", True)
        self.taken = 0
        inner = self._open(request)
        self.report, theirs = os.pipe()
        self.ending, self.reaped = self.report, reaped
        try:
            self.pid = os.fork()
            if self.pid == 0:
                (reap if reaped else command)(request, body, limits, inner, theirs)
        except OSError:
            self.close()
            raise
        finally:
            for file in {*inner, theirs}:
                os.close(file)
        for file in self.files():
            os.set_blocking(file, False)
        if not reaped:
            self.ending = os.pidfd_open(self.pid)

    def _open(self, request: dict[str, Any]) -> tuple[int, ...]:
        """Open the streams; return the command's descriptors of them."""
        self.streams: dict[int, str] = {}
        if request.get("columns"):
            self.feed, slave = os.openpty()
            self.resize(request["columns"], request["rows"])
            self.streams[os.dup(self.feed)] = "stdout"
            return slave, slave, slave
        stdin, self.feed = os.pipe()
        inner = [stdin]
        for name in STREAMS:
            reading, writing = os.pipe()
            self.streams[reading] = name
            inner.append(writing)
        return tuple(inner)

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of a terminal."""
        fcntl.ioctl(self.feed, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def files(self) -> list[int]:
        """Return the descriptors that the box holds for the command."""
        return [file for file in {self.report, self.ending, self.feed, *self.streams} if file >= 0]

    def close(self) -> None:
        """Close the descriptors that the box holds for the command."""
        for file in self.files():
            os.close(file)
        self.report = self.ending = self.feed = -1
        self.streams.clear()

    def feed_on(self) -> int:
        """Write pending standard input to the command; return how many more bytes the parent may send."""
        try:
            while self.input:
                count = os.write(self.feed, self.input[:PIECE_BYTES])
                self.input = self.input[count:]
                self.taken += count
        except BlockingIOError:
            pass
        except OSError:
            self.taken += len(self.input)
            self.input = self.input[:0]
        if not self.input and self.input_ends and self.feed >= 0:
            os.close(self.feed)
            self.feed = -1
        taken = self.taken if self.taken >= PIECE_BYTES or not self.input else 0
        self.taken -= max(0, taken)
        return taken

    def feed_more(self, body: bytes, ends: bool) -> None:
        """Add to the pending standard input."""
        self.input = memoryview(bytes(self.input) + body if self.input else body)
        self.input_ends |= ends

    def read_on(self, file: int, tell: Callable[[str, bytes], None]) -> bool | None:
        """Read a piece of a stream, keep it and `tell` it. Return False at the stream's end, None without a piece."""
        try:
            piece = os.read(file, PIECE_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # a terminal that nobody has open
            piece = b""
        if not piece:
            return False
        name = self.streams[file]
        self.outputs[name].add(piece)
        if self.credit is not None:
            self.credit -= len(piece)
            tell(name, piece)
        return True

    def hear_end(self) -> None:
        """Read the exit status of an ended command that has no reaper."""
        while self.hear():  # what it told before is there
            pass
        _, status, used = os.wait4(self.pid, 0)
        self.code, self._peak_bytes = os.waitstatus_to_exitcode(status), used.ru_maxrss << 10

    def hear(self) -> bool:
        """Read the reports of the command and its reaper. Return False at the end of the reports."""
        try:
            said = os.read(self.report, 64)
        except BlockingIOError:
            return True
        self._said += said
        while self._said:
            if self._said[:1] == ARMED:
                self.armed, self._said = True, self._said[1:]
            elif self._said[:1] == NO_FOLDER and len(self._said) > 1:
                self.armed, self.folder_error, self._said = True, self._said[1], self._said[2:]
            elif self._said[:1] == ENDED and len(self._said) >= STATUS.size:
                _, status, peak_kib = STATUS.unpack(self._said[: STATUS.size])
                self.code, self._peak_bytes = os.waitstatus_to_exitcode(status), peak_kib << 10
                self._said = self._said[STATUS.size :]
            else:
                break
        return bool(said)

    @property
    def begun(self) -> bool:
        """Whether the command has begun: it is confined."""
        return self.armed

    def check_confined(self) -> None:
        """Raise RuntimeError if the command ended by itself before it was confined, and was not killed."""
        if self.code is not None and self.code >= 0 and not self.armed:
            said = b"".join(self.outputs["stderr"].kept()).decode("utf-8", "replace")
            raise RuntimeError(f"the command could not be confined: {said}")

    def told(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the header of the command's end, or of its output so far, and the bodies.

        A command can end by any signal and with any status, so these alone do not prove that a limit was hit.
        """
        code, limit = self.code, self.limit
        if self.op == "python" and code == -OUT_OF_MEMORY:
            if not limit and self._peak_bytes - own_bytes() > self.limits["memory"] // GOOD_PART:
                limit = "out of memory"
            code = 1
        code = -9 if code is None else code
        end = limit or ("signalled" if code < 0 else "out of disk" if code and _is_disk_full() else "exited")
        parts = [part for name in STREAMS for part in self.outputs[name].kept()]
        header = {
            "id": self.id,
            "end": end,
            "exit": 128 - code if code < 0 else code,
            "wall": time.monotonic() - self.started,
            "parts": [len(part) for part in parts],
            "totals": [self.outputs[name].total for name in STREAMS],
            "folder": self.folder_error,
            "running": self.code is None and not limit,
        }
        return header, parts


def _is_disk_full() -> bool:
    disk = os.statvfs(DISK)
    return disk.f_bavail == 0 or disk.f_favail == 0
