"""Frames between two processes: a length in 8 bytes, then as many bytes."""

from __future__ import annotations

import os
import select
import struct
import time

LENGTH = struct.Struct("<Q")
AT_ONCE = 1 << 20
"""Bytes that are written or read at once."""


class StandsStill(OSError):
    """The other end has neither written nor read for too long."""


def send(pipe: int, data: bytes, silent_s: float | None = None) -> None:
    """Write a frame to a file descriptor. If the other end reads nothing for `silent_s` seconds, raise `StandsStill`;
    None waits for ever."""
    os.set_blocking(pipe, silent_s is None)
    for part in (LENGTH.pack(len(data)), data):
        rest = memoryview(part)
        while rest:
            if silent_s is not None and not _ready(pipe, select.POLLOUT, silent_s):
                raise StandsStill
            rest = rest[os.write(pipe, rest[:AT_ONCE]) :]


def receive(pipe: int, silent_s: float | None = None) -> bytes:
    """Read a frame from a file descriptor; raise `EOFError` if the stream ends before it. If the other end writes
    nothing for `silent_s` seconds, raise `StandsStill`; None waits for ever."""
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
