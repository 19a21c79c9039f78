"""Protocol of `gateway.sock`, the socket in a run's folder over which `sparring gateway` forwards client connections.

Each connection begins with a line of JSON, a `Greeting`. If the greeting has no `server`, the connection is the control
connection of the gateway: it carries one `Word` per line, and stays open while the gateway serves the run. Every other
connection carries the unchanged bytes of one client. It ends with a mark, which tells whether the client closed its
connection or broke it. A connection that ends without a mark counts as broken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from pathlib import Path

import msgspec

SOCKET = "gateway.sock"
"""Name of the socket in a run's folder."""

MOST_GREETING = 4096
"""Maximum number of bytes of a greeting."""

CLOSED, BROKEN = b"\xff\x00closed\x00\xff", b"\xff\x00broken\x00\xff"
"""Marks that follow a client's last byte. No HTTP or JSON text ends with these bytes. A client that sends them itself
only misreports its own connection."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """First line of a connection.

    Attributes:
        gateway: random id of the gateway's process.
        server: address of the gateway that the client connected to; None for the control connection.
        client: address of the client; None if unknown.
    """

    gateway: str
    server: tuple[str, int] | None = None
    client: tuple[str, int] | None = None


class Word(StrEnum):
    """Line of a control connection. The run sends the first three, and the gateway sends `LEAVES` and `FULL`."""

    BEGUN = auto()
    """The gateway now serves the run."""

    FOLLOWED = auto()
    """Another gateway replaced this one."""

    OVER = auto()
    """The run is over and will not be resumed by another process."""

    LEAVES = auto()
    """The gateway stops, after the responses that are being sent."""

    FULL = auto()
    """The gateway has no room for a client: the run closes a connection that it owes no answer."""


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Open a run's folder and yield a short path of its socket, since the path of a socket has at most 107 bytes. The
    path is valid in this process while the context lasts."""
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{inside}/{SOCKET}"
    finally:
        os.close(inside)
