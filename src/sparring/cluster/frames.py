"""Frames, the messages between two processes: a length in 8 bytes, then as many bytes."""

from __future__ import annotations

import os
import select
import struct
import time

LENGTH = struct.Struct("<Q")
AT_ONCE = 1 << 20
"""Maximum number of bytes of one read or write call."""


class StandsStill(OSError):
    """Error: the process at the other end has not written, or not read, for too long."""


def send(pipe: int, data: bytes, silent_s: float | None = None) -> None:
    """Write a frame to a file descriptor. Raises StandsStill if the other process reads nothing for `silent_s` seconds;
    with None there is no limit."""
    os.set_blocking(pipe, silent_s is None)
    for part in (LENGTH.pack(len(data)), data):
        rest = memoryview(part)
        while rest:
            if silent_s is not None and not _ready(pipe, select.POLLOUT, silent_s):
                raise StandsStill
            rest = rest[os.write(pipe, rest[:AT_ONCE]) :]


def receive(pipe: int, silent_s: float | None = None) -> bytes:
    """Read a frame from a file descriptor. Raises EOFError if the stream ends before the end of the frame, and
    StandsStill if the other process writes nothing for `silent_s` seconds; with None there is no limit."""
    (length,) = LENGTH.unpack(_read(pipe, LENGTH.size, silent_s))
    return bytes(_read(pipe, length, silent_s))


def _read(pipe: int, length: int, silent_s: float | None) -> bytearray:
    data = bytearray()
    while len(data) < length:
        if silent_s is not None and not _ready(pipe, select.POLLIN, silent_s):
            raise StandsStill
        part = os.read(pipe, min(AT_ONCE, length - len(data)))
        if not part:
            raise EOFError
        data += part
    return data


def _ready(pipe: int, event: int, within_s: float) -> bool:
    poll = select.poll()  # select() takes no descriptor above 1,023
    poll.register(pipe, event)
    deadline = time.monotonic() + within_s
    while (rest_s := deadline - time.monotonic()) > 0:
        if poll.poll(1000 * rest_s):
            return True
    return False
