"""Frames between a box and its parent, as the box reads and writes them: without waiting, and without growing.

A frame, both ways: two little-endian uint32 (bytes of header, bytes of body), a JSON header, a body of raw bytes. A
header has the number of its command in `id`. Credit bounds the bytes in flight: for each command the parent reports how
many bytes of output it still takes, and the box how many bytes of input it has passed on. Standard library only, for
Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

PIECE_BYTES = 1 << 16
CROWDED_BYTES = 1 << 18
"""Number of bytes waiting for the parent, from which on the output of commands is not read."""


class Wire:
    """Box's end of its socket.

    Attributes:
        waiting: bytes that the parent has not taken yet.
        at_end: called before this process ends because the parent is gone or has closed the box.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.at_end: Callable[[], None] = lambda: None
        self._connection = connection
        self._head = b""
        self._data = b""
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.waiting = 0

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._connection.fileno()

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame, or None until all of it is there. End of file ends the process: the parent is gone or
        has closed the box."""
        try:
            if len(self._head) < 8:
                self._head += self._some(8 - len(self._head))
            if len(self._head) < 8:
                return None
            sizes = struct.unpack("<II", self._head)
            while len(self._data) < sum(sizes):  # usually one piece: others would leave their mark on the heap
                piece = self._some(sum(sizes) - len(self._data))
                self._data = self._data + piece if self._data else piece
        except BlockingIOError:
            return None
        data, self._head, self._data = self._data, b"", b""
        return json.loads(data[: sizes[0]]), data[sizes[0] :]

    def _some(self, count: int) -> bytes:
        try:
            piece = self._connection.recv(count)
        except ConnectionResetError:
            piece = b""
        if not piece:
            self._end()
        return piece

    def _end(self) -> NoReturn:
        try:
            self.at_end()
        finally:
            os._exit(0)

    def send(self, header: dict[str, Any], *bodies: bytes | bytearray, files: Sequence[int] = ()) -> None:
        """Send one frame, as far as the parent takes it now; `files` go with it, and are closed here."""
        text = json.dumps(header).encode()
        head = struct.pack("<II", len(text), sum(map(len, bodies))) + text
        for number, part in enumerate((head, *bodies)):
            if part:
                self._out.append((memoryview(part), () if number else files))
                self.waiting += len(part)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the parent takes it."""
        try:
            while self._out:
                part, files = self._out[0]
                count = socket.send_fds(self._connection, [part], files) if files else self._connection.send(part)
                for file in files:
                    os.close(file)
                self.waiting -= count
                self._out[0] = (part[count:], ())
                if count == len(part):
                    self._out.popleft()
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._end()
