"""The other end of a guest: runs in the guest's own interpreter, Python 3.9 or newer, with the standard library alone.

    python host.py keep CONTROL ADAPTER     the keeper: starts guests, and ends all that they leave behind
    python host.py serve SOCKET ADAPTER     a guest, or the process that guests are forked from

The keeper gets a byte and a socket for each guest over its own socket, and lives as long as that socket. It runs no
code of the adapter. A guest answers frames (4 bytes of length, big-endian, and a JSON list of calls
`[id, method, world, arguments]`) with frames of `[id, is_right, answer]`. The keeper holds the end of their output.
"""

import ast
import asyncio
import ctypes
import importlib.util
import inspect
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

MOST_BYTES = 1 << 24
"""Maximum size of a frame."""

MOST_SAID = 1 << 13
"""Bytes that the keeper keeps of what guests print."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.5
"""Seconds between two looks for processes that a dead guest left behind."""


def declared(path: str) -> "tuple[dict[str, Any], set[str]]":
    """Read an adapter's constants, such as `REENTRANT = True`, and the names of its functions and classes, without
    running it."""
    with open(path, encoding="utf-8") as file:
        body = ast.parse(file.read(), path).body
    values: dict[str, Any] = {}
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and line.targets[0].id.isupper():
            try:
                values[line.targets[0].id] = ast.literal_eval(line.value)
            except ValueError:
                continue
    return values, {
        line.name for line in body if isinstance(line, (ast.AsyncFunctionDef, ast.ClassDef, ast.FunctionDef))
    }


def keep(control: socket.socket, adapter: str) -> None:
    """Start a guest for each socket that comes over `control`; end them all when it closes."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    origin, ours = None, set()
    if declared(adapter)[0].get("FORKS", True):
        origin, theirs = socket.socketpair()
        ours.add(_serve_apart(theirs, adapter))
    said = b""
    while True:
        ready, _, _ = select.select([control.fileno(), reading], [], [], POLL_S)
        if reading in ready:
            said = (said + os.read(reading, 1 << 16))[-MOST_SAID:]
        if control.fileno() in ready:
            order, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not order:
                break
            if order == b"?":
                control.sendall(struct.pack(">I", len(said)) + said)
            for descriptor in sockets:
                guest = socket.socket(fileno=descriptor)
                if origin is None:
                    ours.add(_serve_apart(guest, adapter))
                else:
                    try:
                        socket.send_fds(origin, [b"+"], [guest.fileno()])
                    except OSError:  # the origin is gone: the guest's end closes, which says so
                        pass
                    guest.close()
        ours -= _end_strays(ours)
    _end_strays(set())
    shutil.rmtree(os.getcwd(), ignore_errors=True)


def _serve_apart(guest: socket.socket, adapter: str) -> int:
    """Start an interpreter that serves a socket, and return its process id."""
    command = [sys.executable, os.path.abspath(__file__), "serve", str(guest.fileno()), adapter]
    process = subprocess.Popen(command, pass_fds=[guest.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    process.returncode = 0  # the keeper reaps it
    guest.close()
    return process.pid


def _end_strays(ours: "set[int]") -> "set[int]":
    """Kill what dead guests left behind, and all children if `ours` is empty; return the ended children."""
    ended: set[int] = set()
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            strays = {int(child) for child in file.read().split()} - ours
        for stray in strays:
            os.kill(stray, signal.SIGKILL)
        try:
            child, _ = os.waitpid(-1, 0 if strays else os.WNOHANG)
        except ChildProcessError:
            return ended
        if not child:
            return ended
        ended.add(child)


class Worlds:
    """Worlds of one process, and their calls.

    Attributes:
        worlds: worlds by number.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.worlds: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()

    def serve(self, guest: socket.socket) -> None:
        """Answer the frames of a socket until it closes."""
        stream = guest.makefile("rb", 1 << 16)
        while True:
            head = stream.read(4)
            if len(head) < 4:
                return
            calls = json.loads(stream.read(struct.unpack(">I", head)[0]))
            body = "[{}]".format(",".join([self._answer(*call) for call in calls])).encode()
            if len(body) > MOST_BYTES:
                error = f"expected an answer of at most {MOST_BYTES} bytes, got {len(body)}"
                body = json.dumps([[call[0], False, error] for call in calls]).encode()
            guest.sendall(struct.pack(">I", len(body)) + body)

    def _answer(self, id: int, method: str, world: int, arguments: "dict[str, Any]") -> str:
        """Return the answer to a call as JSON: what it returned, or what it raised."""
        try:
            return json.dumps([id, True, self._call(method, world, arguments)])
        except BaseException as error:
            return json.dumps([id, False, f"{type(error).__name__}: {error}"])

    def _call(self, method: str, world: int, arguments: "dict[str, Any]") -> Any:
        if method == "hello":
            return os.getpid()
        if method == "make":
            made = self.worlds[world] = self._adapter.World(**arguments)
            return [name for name in dir(made) if not name.startswith("_")]
        if method in ("tasks", "roles", "expert"):
            return self._value(getattr(self._adapter, method)(**arguments))
        if method == "reset":
            _seed_generators(arguments.get("seed", 0))
        if method == "close":
            made = self.worlds.pop(world, None)
            return self._value(made.close()) if hasattr(made, "close") else None
        return self._value(getattr(self.worlds[world], method)(**arguments))

    def _value(self, value: Any) -> Any:
        """Wait for a coroutine; turn an iterator into a list."""
        if inspect.isawaitable(value):
            return self._loop.run_until_complete(value)
        return list(value) if inspect.isgenerator(value) else value


def _seed_generators(seed: int) -> None:
    """Seed the generators that belong to the whole process, which many worlds draw from."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def serve(guest: socket.socket, path: str) -> None:
    """Serve a guest, or fork one for each socket that comes over the socket of the process that guests are forked
    from."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(2, 1)
    sys.path.append(os.path.dirname(path))  # last: an adapter is often named as what it adapts
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None and spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    if not getattr(adapter, "FORKS", True):
        Worlds(adapter).serve(guest)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, sockets, _, _ = socket.recv_fds(guest, 1, 1)
        if not order:
            return
        for descriptor in sockets:
            if os.fork():
                os.close(descriptor)
                continue
            guest.close()
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            try:
                Worlds(adapter).serve(socket.socket(fileno=descriptor))
            finally:
                os._exit(0)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    {"keep": keep, "serve": serve}[sys.argv[1]](socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
