"""Classification of a box's errors by cause: the policy, the machine or the caller (law 6).

`BoxConnection` passes each answer of a box to its `BoxRequest`, which alone chooses the error, so operations need no
rules of their own.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparring.errors import PolicyFailure, SandboxError, SpoiltFile
from sparring.sandbox.snapshots import still_lives

FILE_OPERATIONS = ("read", "write", "remove", "list", "pack", "unpack")
WALKS = ("list", "pack")
"""Operations that take longer the more files a command left."""
MACHINES = (errno.EROFS, errno.ENFILE, errno.EMFILE, errno.EBADF)
"""Errors that no command can cause. EROFS is one, because behind a command's link it is reported as ELOOP. EIO is not:
a command can give a folder attributes that make no sense to the overlay of a later snapshot."""


class PortTaken(PolicyFailure, OSError):
    """Error of a port that the box's caller needs, but at which a command of the box listens."""


class Exhausted(PolicyFailure, OSError):
    """Another command cannot begin: others hold all terminals, processes, or places of running commands."""


_KINDS: dict[str, type[SpoiltFile]] = {"OSError": SpoiltFile}


def spoilt(error: OSError) -> SpoiltFile:
    """Return an error as a `SpoiltFile`, because a command of the policy caused it. Its class is also a subclass of the
    original one, such as `FileNotFoundError`."""
    kind = type(error)
    if kind.__name__ not in _KINDS:
        _KINDS[kind.__name__] = type(f"Spoilt{kind.__name__}", (SpoiltFile, kind), {})
    return _KINDS[kind.__name__](error.errno or errno.ETIMEDOUT, error.strerror or str(error), error.filename)


class Hands:
    """Record of whether the policy may have changed a box: a command has run in it, its world is open, or it was made
    from such a box.

    Args:
        used: whether a command has run in the box that this one is a fork of.

    Attributes:
        used: whether a command has run in this box, or in the box that it is a fork of.
    """

    def __init__(self, used: bool) -> None:
        self.used = used
        self._is_open = False
        self._made_from: Hands | None = None

    def hand_over(self) -> None:
        """Note that the policy acts from now on, and may cause errors even before it has run a command."""
        self._is_open = True

    def take_from(self, asked: Hands) -> None:
        """Note the box from which this one was made, whose commands may have changed the content of this one."""
        self._made_from, self._is_open = (None, True) if asked.are_policys() else (asked, False)

    def are_policys(self) -> bool:
        """Return whether the policy may be the cause of an error."""
        return self.used or self._is_open or self._made_from is not None and self._made_from.are_policys()


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """Request to a box, and whether the policy may be the cause if it fails.

    Attributes:
        request: the request as the box got it.
        used: whether the policy may have changed the box (`Hands`).
        crowded: whether other commands ran in the box, which can delay the request.
    """

    request: Mapping[str, Any]
    used: bool
    crowded: bool

    def error_in(self, header: Mapping[str, Any]) -> Exception | None:
        """Return the error that the header of a command's end reports, or None.

        Returns:
            `OSError`; it is also a `SpoiltFile` if a command of the policy may be the cause.
        """
        if number := header.get("folder", 0):
            return self._error(number, self.request["cwd"])
        if self.request["op"] not in FILE_OPERATIONS or "exit" not in header:
            return None
        path, number = self.request["path"], header["exit"]
        if header["end"] == "timed out":
            held_up = self.crowded or self.request["op"] in WALKS
            return self._error(errno.ETIMEDOUT, path, is_policys=held_up)
        if header["end"] in ("signalled", "killed", "out of memory"):  # by a command beside it, if one has run
            number = errno.EINTR
        too_large = number == errno.EFBIG and "most" in self.request
        text = f"more than {self.request['most']} bytes, which is most_bytes" if too_large else ""
        return self._error(number, path, text, is_policys=number not in MACHINES) if number else None

    def refusal(self, header: Mapping[str, Any]) -> Exception:
        """Return the error for a refused request, by cause: the machine (SandboxError), other commands (Exhausted,
        PortTaken), processes beside a snapshot (BadInput), or else as `error_in`."""
        number, what = header["refused"], os.strerror(header["refused"])
        if header.get("full"):  # which a policy can bring about where its world starts what it asks for
            return Exhausted(number, "box: expected room for one more command, got as many as it runs at once")
        if self.request["op"] == "snapshot":
            return still_lives(header["processes"])
        if "place" in header:
            return self._error(number, header["place"])
        if self.request["op"] == "connect":
            return self._error(number, None, f"port {self.request['port']} of the box: {what}")
        if not self.crowded or number in MACHINES:  # no process outlives its command, so none holds anything
            return SandboxError(f"sandbox: the box begins no more commands: {what}")
        if number == errno.EADDRINUSE:
            return PortTaken(number, f"port {self.request['port']} of the box: {what}")
        return Exhausted(number, f"one more command of the box: {what}")

    def _error(self, number: int, path: str | None, text: str = "", *, is_policys: bool = True) -> OSError:
        plain = OSError(number, text or os.strerror(number), path)  # of the class that belongs to the number
        # `read_plain` blames the policy for every path
        blames = is_policys and (self.used or self.request.get("plain", False))
        return spoilt(plain) if blames else plain


def _of_service(method: Callable[..., Any]) -> Any:
    """Return a method of a socket whose errors are the policy's failures."""

    @functools.wraps(method)
    def called(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except (BlockingIOError, InterruptedError):
            raise
        except OSError as error:
            if error.errno in MACHINES:
                raise
            raise spoilt(error) from error

    return called


class ServiceSocket(socket.socket):
    """Connection to a service that a command of the policy runs. If the connection breaks, or no answer comes within
    the socket's time limit, this is the policy's failure."""

    recv = _of_service(socket.socket.recv)
    recv_into = _of_service(socket.socket.recv_into)
    send = _of_service(socket.socket.send)
    sendall = _of_service(socket.socket.sendall)
    sendmsg = _of_service(socket.socket.sendmsg)
    shutdown = _of_service(socket.socket.shutdown)
