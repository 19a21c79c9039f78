"""Protocol of `gateway.sock`, the socket in a run's folder by which `sparring gateway` passes connections on.

Each connection begins with a line of JSON, a `Greeting`. One without a `server` is the gateway's own: a `Word` a line,
open for as long as the gateway is the run's. Every other one carries the bytes of one client, unchanged, and at its end
a mark: whether the client closed its connection or broke it. A connection that ends without a mark was broken.
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
"""Most bytes of a greeting."""

CLOSED, BROKEN = b"\xff\x00closed\x00\xff", b"\xff\x00broken\x00\xff"
"""Marks behind a client's last byte. No text of HTTP or JSON ends so; a client that does says it of itself alone."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """First line of a connection.

    Attributes:
        gateway: name of the gateway's process, chosen anew by each.
        server: address of the gateway that the client reached; None for the gateway's own connection.
        client: address of the client, where it is known.
    """

    gateway: str
    server: tuple[str, int] | None = None
    client: tuple[str, int] | None = None


class Word(StrEnum):
    """Line of a gateway's own connection."""

    BEGUN = auto()
    """The gateway is the run's; said by the run, like the next two."""

    FOLLOWED = auto()
    """Another gateway is, from now on."""

    OVER = auto()
    """The run is over: no process goes on with it."""

    LEAVES = auto()
    """The gateway ends; answers that are under way may end before."""


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Yield a path of a run's socket that is short enough: a socket's own path has at most 107 bytes. It is valid in
    this process while the context lasts."""
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{inside}/{SOCKET}"
    finally:
        os.close(inside)
