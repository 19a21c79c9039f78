"""Protocol of `gateway.sock`, the socket in a run's folder by which `sparring gateway` hands its clients to the run.

The gateway hands over its listening socket: the run's process accepts and answers the clients itself, and no data of
clients passes through the gateway. The gateway keeps a descriptor of that socket. So connections that nobody has
accepted outlive the run's process, and the gateway can accept them while there is no run.

A connection of `gateway.sock` carries messages (SOCK_SEQPACKET), each a `Word`: `READY` from the run, `LISTENING` with
the descriptor (SCM_RIGHTS, unix(7)) from the gateway, then `BEGUN`, and once `FOLLOWED` or `OVER`, from the run. The
connection stays open while the gateway serves the run; its end means that one of the two processes has ended.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum, auto
from pathlib import Path

from sparring.errors import InfraError
from sparring.gateway.serving import PAUSE_S

SOCKET = "gateway.sock"
"""Name of the socket in a run's folder."""

MOST_BYTES = 64
"""Maximum number of bytes of a message."""


class Word(StrEnum):
    """Message between a run and its gateway."""

    READY = auto()
    """The run has closed the listening socket of an earlier gateway that ended: its address is free."""

    LISTENING = auto()
    """This message carries the gateway's listening socket."""

    BEGUN = auto()
    """The run accepts the clients of this gateway."""

    FOLLOWED = auto()
    """Another gateway replaced this one."""

    OVER = auto()
    """The run is over and will not be resumed by another process."""


async def connect_to_run(folder: Path) -> socket.socket:
    """Connect to the run's process, and wait until it is ready for a listening socket.

    Raises:
        InfraError: the run's process does not answer.
    """
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        control.setblocking(False)
        with socket_path(folder) as short:
            control.connect(short)
        if (word := await next_word(control)) is not Word.READY:
            raise InfraError(f"{folder}: expected the word {Word.READY} of the run, got {word}")
    except BaseException as error:
        control.close()
        if isinstance(error, OSError):
            raise InfraError(f"{folder}: the run does not answer ({type(error).__name__}: {error})") from error
        raise
    return control


async def next_word(control: socket.socket) -> Word:
    """Return the next word of the run.

    Raises:
        InfraError: the run's process has ended, or has another version of sparring.
    """
    try:
        return Word((await asyncio.get_running_loop().sock_recv(control, MOST_BYTES)).decode())
    except (OSError, ValueError) as error:
        raise InfraError("the run's process has ended, or is of another version of Sparring") from error


async def hand_over(control: socket.socket, listening: socket.socket) -> None:
    """Give the run a listening socket.

    Raises:
        InfraError: the run's process has ended.
    """
    while True:
        try:
            socket.send_fds(control, [Word.LISTENING.encode()], [listening.fileno()])
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # this user has as many descriptors under way as files are allowed
                raise InfraError("the run's process has ended") from error
        await asyncio.sleep(PAUSE_S)


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """Open a run's folder and yield a short path of its socket, since the path of a socket has at most 107 bytes. The
    path is valid in this process while the context lasts."""
    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{inside}/{SOCKET}"
    finally:
        os.close(inside)
