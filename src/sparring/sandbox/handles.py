"""Processes, shells and terminals, which run in a box until their caller closes them."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from sparring.errors import PolicyFailure, SandboxError
from sparring.protocols import LiveCommand, Placement
from sparring.sandbox.commands import BoxCommands
from sparring.sandbox.connection import BoxConnection, Call, Pump
from sparring.sandbox.fault import ServiceSocket, spoilt
from sparring.sandbox.requests import as_bytes, bounds_of, check_text, is_passable, request_of
from sparring.sandbox.results import result_of
from sparring.sandbox.screen import Screen
from sparring.types import ExecResult
from sparring.types.boxes import check_count

TERMINAL_BYTES = 1 << 16  # of a terminal's output on their way
SHELL_GRACE_S = 1.5
"""Seconds that the box takes to interrupt a text at its time limit, or to end the shell."""

BITE_BYTES, SLICE_S, PAUSES = 4096, 0.01, 4
"""Bytes of a terminal's output that are shown at a time; seconds of showing after which there is a pause anyway; length
of a pause, as a multiple of the time spent showing."""


class ShellEnded(PolicyFailure):
    """A shell has ended: a text called `exit` or could not be interrupted, or another command killed the shell."""


class NoShell(SandboxError):
    """A shell ended by itself before it read a text."""


class BoxHandle:
    """Long-running command of a box: a process, a shell or a terminal."""

    def __init__(self, commands: BoxCommands, connection: BoxConnection, call: Call) -> None:
        self._commands, self._connection, self._call = commands, connection, call

    @property
    def ended(self) -> bool:
        """Whether the command has ended, by itself, by a limit or with its box."""
        return self._call.told.done()

    def give_up(self) -> None:
        """End the command without waiting for its end."""
        self._connection.give_up(self._call)

    async def _feed(self, data: bytes, *, ends: bool) -> None:
        try:
            await self._connection.feed(self._call, data, ends=ends, patience_s=self._commands.spec.timeout_s)
        except TimeoutError as error:
            raise spoilt(TimeoutError(errno.ETIMEDOUT, "what a command does not read")) from error

    async def close(self) -> None:
        """End the command with all that it started. If the box has failed, they have ended already."""
        if not self._call.closed.done():
            self._connection.tell(self._call, "end")
            try:
                await self._commands.soon(self._call.closed)
            except SandboxError:
                pass


class BoxProcess(BoxHandle):
    """Program that runs at the same time as others. Implements `protocols.LiveProcess`."""

    pump: Pump | None = None

    async def output(self) -> ExecResult:
        if self._call.told.done():
            return result_of(self._call.told.result())
        look = asyncio.get_running_loop().create_future()
        self._call.looks.append(look)
        self._connection.tell(self._call, "look")
        return result_of(await self._commands.soon(look))

    async def write(self, data: bytes | str, *, ends: bool = False) -> None:
        await self._feed(as_bytes(data), ends=ends)

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        waits: list[asyncio.Future[Any]] = [self._call.told]
        if self.pump is not None:
            waits.append(self.pump.task)
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return await self.output()
        if self.pump is not None:
            if not self._call.told.done():
                await self.close()
            await self.pump.end()
        return result_of(self._call.told.result())

    async def kill(self) -> ExecResult:
        await self.close()
        return result_of(self._call.told.result())


class BoxShell(BoxHandle):
    """Shell that runs one text after another in the same state. Implements `protocols.Shell`."""

    _number = 0

    def __init__(self, commands: BoxCommands, connection: BoxConnection, call: Call) -> None:
        super().__init__(commands, connection, call)
        self._one = asyncio.Lock()

    async def begun(self) -> None:
        """Wait until the shell reads.

        Raises:
            ShellEnded: another command ended the shell.
            NoShell: the box's shell does not run.
            SandboxError: the box failed.
        """
        if 0 not in self._call.answers:
            return
        answer = self._call.answers[0]
        await self._commands.soon(answer, self._call.told)
        if not answer.done():
            told = result_of(self._call.told.result())
            if told.end in ("killed", "signalled"):
                raise ShellEnded("another command of the box has stopped or killed the shell")
            raise NoShell(f"sandbox: the shell ended at once: {told.stderr.strip()}")

    async def run(self, text: str, *, timeout_s: float | None = None, output_bytes: int | None = None) -> ExecResult:
        check_text("shell", text)
        if not is_passable(text):
            return ExecResult(exit_code=126, stdout="", stderr="a shell's text is UTF-8 without NUL\n", wall_s=0.0)
        async with self._one, self._commands.slot():
            if self._call.told.done():
                raise ShellEnded(f"the shell has ended: {self._call.told.result().header['end']}")
            self._number += 1
            answer = self._call.answers[self._number] = asyncio.get_running_loop().create_future()
            bounds = bounds_of(self._commands.spec, timeout_s, output_bytes)
            body = text.encode("utf-8", "surrogateescape")
            self._connection.tell(self._call, "say", body, call=self._number, **bounds)
            try:
                return result_of(await self._commands.soon(answer, late_s=bounds["timeout"] + SHELL_GRACE_S))
            except asyncio.CancelledError:
                self._connection.tell(self._call, "interrupt")
                raise


class BoxTerminal(BoxHandle):
    """Program with a terminal. Implements `protocols.Terminal`.

    Showing output takes processor time of the run. So a flood of output is shown in small pieces with pauses, in which
    the program waits.
    """

    def __init__(self, commands: BoxCommands, connection: BoxConnection, call: Call, screen: Screen) -> None:
        super().__init__(commands, connection, call)
        self._screen = screen
        self._unread = bytearray()
        self._reading: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        call.told.add_done_callback(lambda _: self._changed.set())

    def see(self, piece: bytes) -> None:
        """Take a piece of the program's output."""
        self._unread += piece
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Show the output so far, and answer the program's queries to the terminal."""
        clock = asyncio.get_running_loop().time
        while self._unread:
            began = clock()
            bite = bytes(self._unread[:BITE_BYTES])
            del self._unread[:BITE_BYTES]
            for answer in self._screen.feed(bite):
                self._answer(answer)
                if clock() - began > SLICE_S:
                    await asyncio.sleep(PAUSES * (clock() - began))
                    began = clock()
            self._connection.tell(self._call, "credit", bytes=len(bite))
            self._changed.set()
            await asyncio.sleep(PAUSES * (clock() - began))

    def _answer(self, answer: bytes) -> None:
        """Send an answer to the program, unless the program leaves earlier answers unread."""
        if answer and self._call.on_the_way < BITE_BYTES:
            self._call.on_the_way += len(answer)
            self._connection.tell(self._call, "input", answer, ends=False)

    def _is_over(self) -> bool:
        return self.ended and (self._reading is None or self._reading.done())

    def screen(self) -> str:
        return self._screen.text()

    async def type(self, data: str | bytes) -> None:
        await self._feed(as_bytes(data), ends=False)

    async def shows(self, text: str, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while text not in self.screen() and not self._is_over():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return text in self.screen()

    async def quiet(self, quiet_s: float, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_over():
                    self._changed.clear()
                    async with asyncio.timeout(quiet_s):
                        await self._changed.wait()
        except TimeoutError:
            pass

    async def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(columns, rows)
        self._connection.tell(self._call, "resize", columns=columns, rows=rows)

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        done, _ = await asyncio.wait([self._call.told], timeout=timeout_s)
        if done and self._reading is not None:
            await self._reading
        return result_of(self._call.told.result()) if done else None


class BoxHandles:
    """Starter of processes, shells and terminals in a box; they take no slot of the pool. Implements `Sandbox` for
    these."""

    def __init__(self, commands: BoxCommands) -> None:
        self._commands = commands

    async def start(self, argv: Sequence[str] | str, **bounds: Unpack[LiveCommand]) -> BoxProcess:
        request = request_of("start", self._commands.spec, argv, bounds)
        on_output = bounds.get("on_output")
        pump = None if on_output is None else Pump(await self._commands.open(), on_output)
        process = BoxProcess(self._commands, *await self._commands.begin_live(request, pump))
        process.pump = pump
        if pump is not None:
            await pump.__aenter__()
        return process

    async def terminal(
        self, argv: Sequence[str] | str, *, columns: int = 80, rows: int = 24, **placement: Unpack[Placement]
    ) -> BoxTerminal:
        screen = Screen(columns, rows)
        early: list[bytes] = []
        see: list[Callable[[bytes], None]] = [early.append]
        request = request_of("terminal", self._commands.spec, argv, placement)
        request |= {"columns": columns, "rows": rows, "credit": TERMINAL_BYTES}
        request["environment"] = {"TERM": "linux", **request.get("environment", {})}
        begun = await self._commands.begin_live(request, lambda _call, _name, piece: see[0](piece))
        terminal = BoxTerminal(self._commands, *begun, screen)
        see[0] = terminal.see
        for piece in early:
            terminal.see(piece)
        return terminal

    async def shell(self, **placement: Unpack[Placement]) -> BoxShell:
        """Start a shell, or raise `NoShell` if the box's shell does not run."""
        request = request_of("shell", self._commands.spec, (), placement)
        shell = BoxShell(self._commands, *await self._commands.begin_live(request))
        try:
            await shell.begun()
        except BaseException:
            shell.give_up()
            raise
        return shell

    async def connect(self, port: int) -> socket.socket:
        check_count("port", port, 1, 65535)
        connection = await self._commands.open()
        call = connection.ask({"op": "connect", "port": port})
        try:
            link = ServiceSocket(fileno=(await self._commands.soon(call.socket)).detach())
        except asyncio.CancelledError:
            call.close_socket()
            raise
        finally:
            connection.forget(call)
        link.settimeout(self._commands.spec.timeout_s)
        return link
