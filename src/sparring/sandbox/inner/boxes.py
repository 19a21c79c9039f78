"""The program inside bubblewrap: a fork server with boxes as children, which have commands as children.

    server    pid 1 of bubblewrap's namespaces; holds a warm interpreter; sees no code and no output
      box     pid 1 of its own user, mount, pid, ipc and network namespaces; talks to the parent over its own socket
        command    a fork of the box without capabilities and without the socket; its child processes end with it

An idle box blocks in one read. Nothing here outlives the parent: end of file on a socket ends its reader, and the
kernel kills the rest of a pid namespace with its pid 1.

Wire form, both ways: two little-endian uint32 (bytes of header, bytes of body), a JSON header, a body of raw bytes.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

from sparring.sandbox.inner.confine import (
    Furnished,
    address_space_bytes,
    fork_isolated,
    furnish,
    narrow,
    raise_loopback,
)
from sparring.sandbox.inner.files import run_on_files
from sparring.sandbox.inner.root import processes

ASKED, ANSWERED = 200, 201  # descriptors of a joined box's first command: to read from the other box, to write to it
OUT_OF_MEMORY = signal.SIGRTMAX  # sent to itself by Python code after an uncaught MemoryError. The box believes it if
NO_MEMORY = -1  #                      that code held more than 1 / GOOD_PART of its memory limit.
GOOD_PART = 4
POLL_S = 0.02
PROGRAM_POLL_S = 0.2  # a program runs for minutes with many threads: a poll costs more and may be rarer
CPUS = len(os.sched_getaffinity(0))
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
WARM = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator re string "
    "typing"
).split()  # without random and statistics: they load OpenSSL, and every fork would pay for its pages


def send(connection: socket.socket, header: dict[str, Any], *bodies: bytes | bytearray) -> None:
    """Write one frame; its body in parts, to avoid a copy."""
    text = json.dumps(header).encode()
    connection.sendall(struct.pack("<II", len(text), sum(map(len, bodies))) + text)
    for body in bodies:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Read one frame. End of file ends the process: the parent is gone or has closed the box."""
    sizes = struct.unpack("<II", _exactly(connection, 8))
    header = json.loads(_exactly(connection, sizes[0]))
    return header, _exactly(connection, sizes[1])


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:  # usually one call: pieces of varying size would leave their mark on the heap
        piece = connection.recv(count - len(data), socket.MSG_WAITALL)
        if not piece:
            os._exit(0)
        data = data + piece if data else piece
    return data


# ---- a command, in its own process ----


class TopLevel:
    """Handler of a program's uncaught exception: reports it and turns it into an exit status, as the interpreter
    does."""

    def __init__(self) -> None:
        self.status = 0

    def __enter__(self) -> TopLevel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit):
            self.status = _exit_status(error.code)
        elif kind is not None and error is not None:
            self.status = {KeyboardInterrupt: 130, MemoryError: NO_MEMORY}.get(kind, 1)
            trace = None if trace is None else trace.tb_next  # skip our own frame
            if kind is MemoryError:
                traceback.clear_frames(trace)  # free the memory before the report needs some
            sys.excepthook(kind, error.with_traceback(trace), trace)
        return True


def _run_python(code: bytes) -> int:
    """Run code as `python3 -c` would, and return its exit status."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = ["-c"]
    sys.setrecursionlimit(sys.getrecursionlimit() + _depth(sys._getframe()))  # our frames do not count
    with TopLevel() as top:
        exec(compile(code.decode("utf-8", "surrogatepass"), "<string>", "exec"), main.__dict__)
    with TopLevel():
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls at its end; no stub names it
        atexit._run_exitfuncs()
    return top.status


def _depth(frame: types.FrameType | None) -> int:
    return 0 if frame is None else 1 + _depth(frame.f_back)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _run_program(argv: list[str]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    name = argv[0] if argv else "(no program)"
    try:
        os.execvp(name, argv)
    except (OSError, ValueError) as error:
        print(f"{name}: {getattr(error, 'strerror', error)}", file=sys.stderr)
        return 126 if isinstance(error, (PermissionError, ValueError)) else 127


def command(
    request: dict[str, Any], body: bytes, limits: dict[str, Any], pipes: tuple[int, ...], armed: int
) -> NoReturn:
    """Turn this process into a restricted command, run it and exit. Never returns. Writes a byte to `armed` once the
    restrictions hold."""
    status = 1
    try:
        for target, pipe in enumerate(pipes):
            os.dup2(pipe, target)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        address = resource.RLIM_INFINITY if request["op"] == "program" else limits["address"]
        narrow(address, math.ceil(request["timeout"] * CPUS) + 2, limits["furnished"])
        os.write(armed, b"!")
        os.closerange(3, ASKED)
        os.closerange(ANSWERED + 1, 1 << 16)
        gc.enable()
        if request["op"] == "python":
            status = _run_python(body)
        elif request["op"] in ("exec", "program"):
            if request["op"] == "program":
                os.environ.clear()
                os.environ.update(request["environment"])
            status = _run_program(request["argv"])
        else:
            status = run_on_files(request)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        _flush()
        if status == NO_MEMORY:
            os.kill(os.getpid(), OUT_OF_MEMORY)
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


# ---- a box: pid 1 of its namespaces ----


class Run:
    """Running command: its pipes, its clock, its output so far."""

    def __init__(self, request: dict[str, Any], body: bytes, limits: dict[str, Any]) -> None:
        self.request_id = request["id"]
        self.limits = limits
        self.output_bytes = request["output"]
        self.stdin = memoryview(b"" if request["op"] == "python" else body)
        self.is_python = request["op"] == "python"
        self.started = time.monotonic()
        self.deadline = self.started + request["timeout"]
        self.poll_s = PROGRAM_POLL_S if request["op"] == "program" else POLL_S
        self.truncated = self.timed_out = self.out_of_memory = False
        inner, outer = zip(os.pipe(), os.pipe()[::-1], os.pipe()[::-1], os.pipe()[::-1], strict=False)
        self.pid = os.fork()
        if self.pid == 0:
            command(request, body, limits, inner[:3], inner[3])
        for pipe in inner:
            os.close(pipe)
        for pipe in outer:
            os.set_blocking(pipe, False)
        self.feed, self.stdout, self.stderr, self.armed = outer
        self.output = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.exited = os.pidfd_open(self.pid)
        self.status = self.peak_bytes = 0

    def watch(self, connection: socket.socket) -> None:
        """Serve the pipes until the command ends or exceeds a limit, then end its processes."""
        poll = select.poll()
        for file in (connection.fileno(), self.exited, self.stdout, self.stderr):
            poll.register(file, select.POLLIN)
        poll.register(self.feed, select.POLLOUT)
        self._write_stdin(poll)
        running, by_itself, look = True, False, self.started + self.poll_s
        while running:
            remaining_s = self.deadline - time.monotonic()
            ready = poll.poll(1000 * max(0.0, min(remaining_s, self.poll_s)))
            for file, _ in ready:
                if file == connection.fileno():
                    receive(connection)  # the parent sends only "cancel" while a command runs
                    running = False
                elif file == self.exited:
                    running, by_itself = False, True
                elif file == self.feed:
                    self._write_stdin(poll)
                elif self._read_output(file) is False:
                    poll.unregister(file)
            if running and remaining_s <= 0:
                self.timed_out, running = True, False
            elif running and time.monotonic() >= look:
                look = time.monotonic() + self.poll_s
                self._reap(os.WNOHANG)
                if resident_bytes() > self.limits["memory"]:
                    self.out_of_memory, running = True, False
        self._end(by_itself=by_itself)

    def _write_stdin(self, poll: select.poll) -> None:
        try:
            self.stdin = self.stdin[os.write(self.feed, self.stdin[: 1 << 16]) :]
        except BlockingIOError:
            return
        except OSError:
            self.stdin = self.stdin[:0]
        if not self.stdin:
            poll.unregister(self.feed)
            os.close(self.feed)
            self.feed = -1

    def _read_output(self, file: int) -> bool | None:
        """Store the next piece of output. Return False at the end of the pipe, None if it is empty."""
        try:
            piece = os.read(file, 1 << 16)
        except BlockingIOError:
            return None
        output = self.output[file]
        room = self.output_bytes - len(output)
        output += piece[:room]
        self.truncated |= len(piece) > room
        return bool(piece)

    def _reap(self, options: int) -> bool:
        """Reap one dead process of the command or an orphan. Return False if there is none to wait for."""
        try:
            pid, status, used = os.wait4(-1, options)
        except ChildProcessError:
            return False
        if pid == self.pid:
            self.status, self.peak_bytes = status, used.ru_maxrss << 10
        return True

    def _end(self, *, by_itself: bool) -> None:
        """Kill and reap every process of the box but its pid 1. kill(-1) reaches all of them at once, even while one
        forks."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            if not self._reap(0):
                break
        for file in (self.stdout, self.stderr):
            while self._read_output(file):
                # only what is there: a pipe that the command sent over a socket may stay open for long
                pass
        if by_itself and not os.read(self.armed, 1):
            raise RuntimeError(
                "the command could not be confined: " + self.output[self.stderr].decode("utf-8", "replace")
            )
        for file in (self.feed, self.stdout, self.stderr, self.armed, self.exited):
            if file >= 0:
                os.close(file)

    def result(self) -> dict[str, Any]:
        """Return the header of the answer. A command can end by any signal and with any status, so these alone do not
        prove that a limit was hit."""
        code = os.waitstatus_to_exitcode(self.status)
        if self.is_python and code == -OUT_OF_MEMORY:
            self.out_of_memory |= self.peak_bytes - own_bytes() > self.limits["memory"] // GOOD_PART
            code = 1
        return {
            "id": self.request_id,
            "exit": 128 - code if code < 0 else code,
            "wall": time.monotonic() - self.started,
            "timed_out": self.timed_out,
            "out_of_memory": self.out_of_memory,
            "truncated": self.truncated,
            "stdout": len(self.output[self.stdout]),
        }


def resident_bytes() -> int:
    """Return the bytes that the box's commands hold, without what each shares with the warm interpreter (pid 1)."""
    resident = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/statm", "rb") as file:
                    resident[entry] = int(file.read().split()[1]) * PAGE_BYTES
            except OSError:
                pass  # it has just ended
    base = resident.pop("1", 0)
    return sum(max(0, value - base) for value in resident.values())


def own_bytes() -> int:
    """Return the bytes that this process holds, which each command shares when it starts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def box(connection: socket.socket, joined: list[int], frozen: list[int]) -> NoReturn:
    """Serve one box until its socket closes. Never returns. `joined` are a socket over which the parent receives
    descriptors (listening sockets of programs, layers), and perhaps two pipe ends for the first command; `frozen` are
    layers of another box."""
    try:
        passing = socket.socket(fileno=joined.pop(0))
        for target, file in zip((ASKED, ANSWERED), joined, strict=False):
            os.dup2(file, target)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # the kernel shields pid 1 from signals of its namespace only if it has no handler
        limits, _ = receive(connection)
        limits["furnished"] = furnished = furnish(limits, frozen)
        give(passing, furnished.tree.returned)
        limits["address"] = address_space_bytes() + limits["memory"]  # memory limit on top of the warm interpreter
        while True:
            request, body = receive(connection)
            if request["op"] == "cancel":
                continue  # it arrived after the end of the command
            if request["op"] == "snapshot":
                send(connection, snapshot(passing, furnished, request["id"]))
                continue
            if request["op"] == "program":
                open_port(passing, request["port"])
            run = Run(request, body, limits)
            while joined:
                joined.pop()
                os.close(ASKED + len(joined))
            run.watch(connection)
            send(connection, run.result(), run.output[run.stdout], run.output[run.stderr])
    except BaseException as error:
        send(connection, {"broken": f"{type(error).__name__}: {error}"})
        raise
    finally:
        os._exit(1)


def snapshot(passing: socket.socket, furnished: Furnished, request_id: int) -> dict[str, Any]:
    """Freeze the box's files, pass the frozen layer to the parent, and return the header of the answer."""
    running = processes()
    give(passing, [furnished.tree.snapshot()])
    return {"id": request_id, "processes": running}


def give(passing: socket.socket, files: list[int]) -> None:
    """Pass descriptors to the parent, and close them here."""
    if files:
        socket.send_fds(passing, [b"f"], files)
    for file in files:
        os.close(file)


def open_port(ports: socket.socket, port: int) -> None:
    """Listen on the box's own loopback interface, and send the listening socket to the parent, which then accepts this
    box's connections."""
    raise_loopback()
    with socket.create_server(("127.0.0.1", port), backlog=128) as listening:
        socket.send_fds(ports, [b"p"], [listening.fileno()])


def warm_up() -> None:
    """Import common modules, and set up the interpreter as for `python3 -c`."""
    for name in WARM:
        try:
            __import__(name)
        except ImportError:
            pass  # a minimal Python; a command that imports it gets the same error
    site.setquit()
    site.sethelper()
    os.environ["PWD"] = "/box"
    sys.path[:] = ["", *(entry for entry in sys.path if entry)]
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in a fork would copy pages for nothing


def serve() -> None:
    """Start a box for every socket that the parent sends over fd 0, until it closes fd 0. Never returns."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps boxes
    warm_up()
    while True:
        byte, files, _, _ = socket.recv_fds(control, 1, 253)
        if not byte:
            os._exit(0)
        num_joined = len(files) - byte[0]
        connection, joined, frozen = socket.socket(fileno=files[0]), files[1:num_joined], files[num_joined:]
        try:
            pid = fork_isolated()
        except OSError as error:
            send(connection, {"broken": f"{error.filename}: {error.strerror}"})
        else:
            if pid == 0:
                control.close()
                box(connection, joined, frozen)
        for file in joined + frozen:
            os.close(file)
        connection.close()
