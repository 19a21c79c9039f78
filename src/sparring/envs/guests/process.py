"""Guests: processes with worlds of other people in an interpreter of their own. `host` is their end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from sparring.envs.guests import host
from sparring.errors import EnvError

HOST = Path(host.__file__)
PASSED = ("HOME", "LANG", "LC_ALL", "PATH", "TZ")
"""Variables of this process that every guest gets."""


class GuestFailed(EnvError):
    """A guest died, hung, or wrote what is no answer."""


class Guest:
    """Our end of one guest: its calls, of many worlds at once. What waits together goes in one frame.

    Attributes:
        pid: process id; 0 until the guest has answered `hello`.
        failure: why it answers no more; empty while it does.

    Args:
        is_shared: whether the guest stays when a world leaves it.
    """

    def __init__(self, keeper: GuestKeeper, *, is_shared: bool = False) -> None:
        self.pid, self.failure, self._is_shared = 0, "", is_shared
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._calls: list[tuple[int, str, int, Mapping[str, Any]]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._buffer = bytearray()
        self._handle: int | None = None
        self._transport: asyncio.Transport | None = None

    async def start(self) -> None:
        """Start the guest and wait until it answers. Raises GuestFailed if it ends before."""
        ours = self._keeper.start()
        self._transport, _ = await self._loop.create_connection(lambda: _Frames(self), sock=ours)
        self.pid = await self.call("hello", 0, {})
        with suppress(OSError):
            self._handle = os.pidfd_open(self.pid)

    async def call(self, method: str, world: int, arguments: Mapping[str, Any]) -> Any:
        """Return the answer to a call.

        Raises:
            GuestFailed: the guest died, or wrote what is no answer. A call that is cancelled kills it.
            EnvError: the world's own code raised.
        """
        if self.failure:
            raise GuestFailed(self.failure)
        id, answer = next(self._ids), self._loop.create_future()
        self._waiting[id] = answer
        if not self._calls:
            self._loop.call_soon(self._flush)
        self._calls.append((id, method, world, arguments))
        try:
            return await answer
        except asyncio.CancelledError:
            self.end("it was ended because a call took too long, or was given up")
            raise

    async def leave(self, number: int) -> None:
        """Close a world. The guest ends with it, unless worlds share it."""
        if not self.failure:
            await self.call("close", number, {})
        if not self._is_shared:
            self.end()

    def end(self, failure: str = "it has ended") -> None:
        """Kill the guest with all processes of its group. Safe to call twice."""
        self._fail(failure)
        if self._transport is not None:
            self._transport.abort()
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, 0)  # the id is still that of this process
                os.killpg(self.pid, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None

    def received(self, data: bytes) -> None:
        """Take bytes of the guest, and answer the calls of each whole frame."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            size = int.from_bytes(buffer[:4], "big")
            if size > host.MOST_BYTES:
                self.end(f"it wrote a frame of {size} bytes, at most {host.MOST_BYTES} are read")
                return
            if len(buffer) < 4 + size:
                return
            try:
                answers = _DECODER.decode(memoryview(buffer)[4 : 4 + size])
            except msgspec.DecodeError as error:
                self.end(f"it wrote what is no answer: {error}")
                return
            del buffer[: 4 + size]
            for id, is_right, answer in answers:
                waiting = self._waiting.pop(id, None)
                if waiting is None or waiting.done():
                    continue
                if is_right:
                    waiting.set_result(answer)
                else:
                    waiting.set_exception(EnvError(f"{self._keeper.name}: {answer}"))

    def lost(self) -> None:
        """Fail all calls, because the guest's end has closed."""
        if not self.failure:
            self.end(f"it died{self._keeper.said()}")

    def _flush(self) -> None:
        body = msgspec.json.encode(self._calls)
        self._calls.clear()
        if self._transport is not None and not self.failure:
            self._transport.write(len(body).to_bytes(4, "big") + body)

    def _fail(self, failure: str) -> None:
        self.failure = self.failure or f"{self._keeper.name}: {failure}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(GuestFailed(self.failure))
        self._waiting.clear()


_DECODER = msgspec.json.Decoder(list[tuple[int, bool, Any]])


class _Frames(asyncio.Protocol):
    """Protocol of a guest's socket."""

    def __init__(self, guest: Guest) -> None:
        """Hand what comes to `guest`."""
        self._guest = guest

    def data_received(self, data: bytes) -> None:
        """Hand bytes on."""
        self._guest.received(data)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what waits."""
        self._guest.lost()


class GuestKeeper:
    """Process that starts guests, and ends with this one whatever ends it; then no guest is left.

    Args:
        python: interpreter of the guests.
        adapter: file with the class `World`.
        variables: variables of the guests beside the few that every one gets.

    Attributes:
        name: name of the adapter, for errors.
    """

    def __init__(self, python: Path, adapter: Path, variables: Mapping[str, str]) -> None:
        self.name = f"guest {adapter.stem}"
        self._folder = tempfile.TemporaryDirectory(prefix="sparring-guest-", ignore_cleanup_errors=True)
        self._control, theirs = socket.socketpair()
        passed = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._process = subprocess.Popen(
            [python, HOST, "keep", str(theirs.fileno()), adapter],
            cwd=self._folder.name,
            env={**passed, "TMPDIR": self._folder.name, "PYTHONUNBUFFERED": "1", **variables},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()

    def start(self) -> socket.socket:
        """Begin to start a guest, and return our end of its socket."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # a dead keeper leaves the guest's end closed, which its first call meets
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return ours

    def ask(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Return the answer of a guest of its own to one call, blocking.

        Raises:
            GuestFailed: it died. EnvError: the adapter's code raised.
        """
        body = msgspec.json.encode([(0, method, 0, arguments)])
        frame = b""
        with self.start() as guest, guest.makefile("rb") as stream, suppress(OSError):
            guest.sendall(len(body).to_bytes(4, "big") + body)
            frame = stream.read(int.from_bytes(stream.read(4), "big"))
        if not frame:
            raise GuestFailed(f"{self.name}: it died{self.said()}")
        ((_, is_right, answer),) = _DECODER.decode(frame)
        if not is_right:
            raise EnvError(f"{self.name}: {answer}")
        return answer

    def said(self) -> str:
        """Return the end of what guests printed, as a clause."""
        try:
            self._control.sendall(b"?")
            size = int.from_bytes(self._control.recv(4, socket.MSG_WAITALL), "big")
            said = self._control.recv(size, socket.MSG_WAITALL).decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f"; the last that it printed: {said[-500:]}" if said else ""

    def end(self) -> None:
        """End the keeper and all its guests."""
        self._control.close()
        self._process.wait()
        self._folder.cleanup()
