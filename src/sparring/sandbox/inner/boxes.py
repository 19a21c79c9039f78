"""The program inside bubblewrap: a fork server with boxes as children, which have commands as children.

    server    pid 1 of bubblewrap's namespaces; holds a warm interpreter; sees no code and no output
      box     pid 1 of its own user, mount, pid, ipc and network namespaces; talks to the parent over its own socket
        reaper, command    `command`; many at once

A box loops over messages of its commands and its parent; idle, it blocks in one poll. Nothing here outlives the parent:
end of file on a socket ends its reader, and the kernel kills the rest of a pid namespace with its pid 1.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import site
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from sparring.sandbox.inner.command import ANSWERED, ASKED
from sparring.sandbox.inner.confine import address_space_bytes, fork_isolated, furnish, raise_loopback, tcp_bytes
from sparring.sandbox.inner.processes import below, command_lines, end_all, parents, reap_orphans, resident_bytes
from sparring.sandbox.inner.run import Run
from sparring.sandbox.inner.shell import ShellRun
from sparring.sandbox.inner.wire import CROWDED_BYTES, Wire

MOST_RUNS = 64
"""Maximum number of concurrent commands of a box."""
CONNECT_S = 5.0
BEGIN_S = 15.0
"""Seconds that a process, shell or terminal may take to begin."""
DRAIN_PIECES = 64
"""Maximum number of pieces read of a stream after its command's end: others may go on filling the pipe."""
LATER = ("end", "credit", "input", "interrupt", "resize", "look", "say")
"""Operations on a running command."""
NETWORKED = ("program", "start", "shell", "terminal", "connect")
WARM = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator re string "
    "typing"
).split()  # without random and statistics: they load OpenSSL, and every fork would pay for its pages


class Box:
    """Pid 1 of a box.

    Args:
        joined: two pipe ends, which the first command gets as descriptors `ASKED` and `ANSWERED`; or none.
        frozen: descriptors of frozen layers of another box.
        doors: files by which commands enter the box's control group; empty without a group. This process stays outside,
            so the memory of commands cannot end it.
    """

    def __init__(self, wire: Wire, joined: list[int], frozen: list[int], doors: list[int]) -> None:
        for number, file in enumerate(joined):
            os.dup2(file, (ASKED, ANSWERED)[number])
            os.close(file)
        self._joined = bool(joined)
        self._wire = wire
        self._poll = select.poll()
        self._poll.register(self._wire.fileno(), select.POLLIN)
        self._asked: dict[int, int] = {self._wire.fileno(): select.POLLIN}
        self._runs: dict[int, Run] = {}
        self._connecting: dict[int, tuple[int, socket.socket, float]] = {}
        self._look, self._loopback = 0.0, False
        self._snapshot: dict[str, Any] | None = None
        self._limits = limits = self._first()
        limits["own_processes"] = limits["processes"] + 1 + 3 * MOST_RUNS
        limits["doors"] = doors
        limits["furnished"] = self._furnished = furnish(limits, frozen)
        self._wire.at_end = self._leave
        returned = self._furnished.tree.returned
        if returned:
            self._wire.send({"id": limits["id"], "layers": len(returned), "closed": True}, files=returned)
        limits["address"] = address_space_bytes() + limits["memory"]  # on top of the warm interpreter

    def _first(self) -> dict[str, Any]:
        while (frame := self._wire.receive()) is None:
            self._poll.poll()
        return frame[0]

    def _leave(self) -> None:
        """Free the files written since the last snapshot; otherwise the snapshot would keep them in memory."""
        if self._furnished.tree.has_frozen:
            end_all()
            self._furnished.tree.drop_last()

    def serve(self) -> NoReturn:
        """Serve until the socket closes."""
        while True:
            self._watch()
            events = self._poll.poll(self._wait_ms())
            # the parent last: its requests may open files that get the same numbers as files of these events
            for file, _ in sorted(events, key=lambda event: event[0] == self._wire.fileno()):
                if file == self._wire.fileno():
                    self._wire.flush()
                    while (frame := self._wire.receive()) is not None:
                        self._obey(*frame)
                elif file in self._connecting:
                    self._connected(file)
                else:
                    self._hear(file)
            self._look_at_limits()
            if self._snapshot is not None and not self._runs.keys() - self._idle():
                self._freeze(self._snapshot)

    def _watch(self) -> None:
        wanted = {self._wire.fileno(): select.POLLIN | (select.POLLOUT if self._wire.waiting else 0)}
        wanted.update(dict.fromkeys(self._connecting, select.POLLOUT))
        crowded = self._wire.waiting >= CROWDED_BYTES
        for run in self._runs.values():
            if run.ending >= 0:
                wanted[run.ending] = select.POLLIN
            if isinstance(run, ShellRun) and run.heard >= 0:
                wanted[run.heard] = select.POLLIN
            if run.input and run.feed >= 0:
                wanted[run.feed] = select.POLLOUT
            if run.credit is None or run.credit > 0 and not crowded:
                wanted.update(dict.fromkeys(run.streams, select.POLLIN))
        if wanted != self._asked:
            for file in self._asked.keys() - wanted.keys():
                self._poll.unregister(file)
            for file, events in wanted.items():
                self._poll.register(file, events)
            self._asked = wanted

    def _wait_ms(self) -> float | None:
        """Return the milliseconds until the next deadline or check of limits, or None."""
        times = [run.deadline for run in self._runs.values() if run.deadline is not None and not run.result]
        times += [until for _, _, until in self._connecting.values()]
        times += [self._look] if self._runs else []
        return max(0.0, 1000 * (min(times) - time.monotonic())) if times else None

    # ---- requests of the parent ----

    def _obey(self, request: dict[str, Any], body: bytes) -> None:
        op, run = request["op"], self._runs.get(request["id"])
        if op == "connect":
            self._connect(request["id"], request["port"])
        elif op == "snapshot":
            self._prepare_snapshot(request)
        elif op == "end" and run is not None:
            if run.result is None:
                run.limit = "killed"
            self._finish(run)
        elif op == "end" and request["id"] == 0:
            for other in [other for other in self._runs.values() if not other.kept]:
                other.limit = "killed"
                self._finish(other)
        elif op == "credit" and run is not None and run.credit is not None:
            run.credit += request["bytes"]
        elif op == "input" and run is not None:
            run.feed_more(body, request["ends"])
            self._feed(run)
        elif op == "resize" and run is not None:
            run.resize(request["columns"], request["rows"])
        elif op == "interrupt" and isinstance(run, ShellRun):
            if run.call and run.deadline is not None:
                run.limit, run.deadline = "killed", 0.0
        elif op == "look" and run is not None:
            header, parts = run.told()
            self._wire.send({**header, "look": True}, *parts)
        elif op == "say" and isinstance(run, ShellRun):
            run.say(request, body)
            self._feed(run)
        elif op in LATER:
            self._wire.send({"id": request["id"], "closed": True})  # it arrived after the end
        else:
            self._start(request, body)

    def _prepare_snapshot(self, request: dict[str, Any]) -> None:
        """Note that a snapshot is wanted as soon as no command runs. Processes that live on are ended if `ends` of the
        request is set, else the snapshot is refused."""
        live = [run for run in self._runs.values() if run.kept or run.op == "program"]
        live = [run for run in live if run.id not in self._idle()]
        request["processes"] = command_lines(self._reapers()) if live else []
        if live and not request["ends"]:
            self._wire.send({"id": request["id"], "refused": errno.EBUSY, "processes": request["processes"]})
            return
        for run in live:
            run.limit = run.limit or "killed"
            self._finish(run)
        self._snapshot = request

    def _idle(self) -> set[int]:
        """Return the ids of long-running commands whose processes have all ended."""
        ended = {run for run in self._runs.values() if run.kept and run.result is not None}
        tree = parents() if ended else {}
        return {run.id for run in ended if not below({run.pid}, tree)}

    def _freeze(self, request: dict[str, Any]) -> None:
        """Freeze the box's files, and pass the frozen layer to the parent."""
        self._snapshot = None
        end_all()  # what forks faster than one can look would go on in the frozen layer, and in a /proc without covers
        layer = self._furnished.tree.snapshot()
        told = {"id": request["id"], "layers": 1, "processes": request["processes"], "closed": True}
        self._wire.send(told, files=[layer])

    def _start(self, request: dict[str, Any], body: bytes) -> None:
        if len(self._runs) >= MOST_RUNS:
            self._wire.send({"id": request["id"], "refused": errno.EAGAIN, "full": True})
            return
        if request["op"] in NETWORKED or self._furnished.tree.is_rooted:
            self._raise_loopback()
        if request["op"] == "program" and not (self._show(request) and self._open_port(request["id"], request["port"])):
            return
        reaped = bool(request.get("kept")) or self._direct() is not None
        request["joined"], request["reapers"] = self._joined, len(self._reapers()) + reaped
        try:
            if request["op"] == "shell":
                run: Run = ShellRun(request, self._limits)
            else:
                run = Run(request, body, self._limits, reaped)
        except OSError as error:  # commands hold every terminal, or every process
            self._wire.send({"id": request["id"], "refused": error.errno})
            return
        self._runs[run.id] = run
        if self._joined:
            os.close(ASKED)
            os.close(ANSWERED)
            self._joined = False
        look = time.monotonic() + run.poll_s
        self._look = look if len(self._runs) == 1 else min(look, self._look)
        self._feed(run)

    def _feed(self, run: Run) -> None:
        taken = run.feed_on()
        if taken > 0:
            self._wire.send({"id": run.id, "taken": taken})

    def _raise_loopback(self) -> None:
        if not self._loopback:
            raise_loopback()
            self._loopback = True

    def _show(self, request: dict[str, Any]) -> bool:
        """Mount a program's files in the root of commands. On failure send a refusal and return False."""
        try:
            self._furnished.tree.show(request["shown"])
        except OSError as error:
            self._wire.send({"id": request["id"], "refused": error.errno, "place": str(error.filename)})
            return False
        return True

    def _open_port(self, number: int, port: int) -> bool:
        """Listen on the box's own loopback interface, and send the listening socket to the parent, which then accepts
        this box's connections."""
        try:
            listening = socket.create_server(("127.0.0.1", port), backlog=128)
        except OSError as error:
            self._wire.send({"id": number, "refused": error.errno})
            return False
        self._wire.send({"id": number, "socket": True}, files=[listening.detach()])
        return True

    def _connect(self, number: int, port: int) -> None:
        self._raise_loopback()
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex(("127.0.0.1", port))
        self._connecting[link.fileno()] = (number, link, time.monotonic() + CONNECT_S)

    def _connected(self, file: int, error: int | None = None) -> None:
        number, link, _ = self._connecting.pop(file)
        error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if error is None else error
        if error:
            link.close()
            self._wire.send({"id": number, "refused": error})
        else:
            link.setblocking(True)
            self._wire.send({"id": number, "socket": True}, files=[link.detach()])

    # ---- messages of the commands ----

    def _hear(self, file: int) -> None:
        for run in list(self._runs.values()):
            if file in run.streams:
                if run.read_on(file, self._teller(run)) is False:
                    del run.streams[file]
                    os.close(file)
                return
            if file == run.ending:
                self._hear_end(run)
                return
            if file == run.feed:
                self._feed(run)
                return
            if isinstance(run, ShellRun) and file == run.heard:
                status = run.hear_status()
                if status is not None:
                    self._end_call(run, status)
                return

    def _teller(self, run: Run) -> Callable[[str, bytes], None]:
        return lambda name, piece: self._wire.send({"id": run.id, "stream": name}, piece)

    def _drain(self, run: Run) -> None:
        for file in list(run.streams):
            for _ in range(DRAIN_PIECES):
                if not run.read_on(file, self._teller(run)):
                    break

    def _hear_end(self, run: Run) -> None:
        if not run.reaped:
            run.hear_end()
        elif not self._hear_reaper(run):
            os.close(run.report)
            run.report = run.ending = -1
            if run.code is None:
                run.limit = run.limit or "killed"
            if self._direct() is None:
                end_all(self._reapers())
        if run.result is None and (run.code is not None or run.limit):
            self._tell(run) if run.kept else self._finish(run)

    def _hear_reaper(self, run: Run) -> bool:
        armed, more = run.armed, run.hear()
        if run.kept and run.armed and not armed and not run.folder_error:
            self._wire.send({"id": run.id, "begun": True})
        return more

    def _direct(self) -> Run | None:
        """Return the command without a reaper, or None. Processes below no reaper belong to this command."""
        return next((run for run in self._runs.values() if not run.reaped), None)

    def _reapers(self, but: Run | None = None) -> set[int]:
        return {run.pid for run in self._runs.values() if run.reaped and run.report >= 0 and run is not but}

    def _end_call(self, run: ShellRun, status: int) -> None:
        self._drain(run)
        header, parts = run.told_call(status)
        self._wire.send(header, *parts)

    def _tell(self, run: Run) -> None:
        self._drain(run)
        run.check_confined()
        call = run.told_call(None) if isinstance(run, ShellRun) and run.call else None
        run.result, parts = run.told()
        self._wire.send({**run.result, "closed": not run.kept}, *parts)
        if call is not None:  # after its shell's end, which whoever waits for the text then knows
            self._wire.send(call[0], *call[1])

    def _finish(self, run: Run) -> None:
        """End a command with all that it left behind."""
        if self._direct() in (None, run):
            end_all(self._reapers(run))
        elif run.report >= 0:
            end_all(only=run.pid)
        if run.result is None:
            self._tell(run)
        if run.kept:
            self._wire.send({"id": run.id, "closed": True})
        run.close()
        del self._runs[run.id]

    # ---- limits ----

    def _look_at_limits(self) -> None:
        now = time.monotonic()
        for file, (_, _, until) in list(self._connecting.items()):
            if now >= until:
                self._connected(file, errno.ETIMEDOUT)
        for run in list(self._runs.values()):
            if run.deadline is not None and now >= run.deadline and run.result is None:
                self._hit(run, "timed out")
            elif run.kept and not run.begun and now >= run.started + BEGIN_S and run.result is None:
                self._hit(run, "killed")  # another command has stopped it
        if not self._runs or now < self._look:
            return
        self._look = now + min(run.poll_s for run in self._runs.values())
        direct = self._direct()
        if direct is not None:
            reap_orphans(direct.pid)
        resident = resident_bytes()
        if sum(resident.values()) + (tcp_bytes() if self._loopback else 0) > self._limits["memory"]:
            tree = parents()
            shares = {
                run.id: sum(resident.get(pid, 0) for pid in below({run.pid}, tree) | {run.pid})
                for run in self._runs.values()
            }
            self._hit(self._runs[max(shares, key=shares.__getitem__)], "out of memory")

    def _hit(self, run: Run, limit: str) -> None:
        """End a command at a limit. In a shell, only the running text is interrupted if it can be."""
        if isinstance(run, ShellRun) and run.call and run.result is None and run.interrupt(limit):
            return
        if run.result is None:
            run.limit = run.limit or limit
        self._finish(run)


def box(connection: socket.socket, joined: list[int], frozen: list[int]) -> NoReturn:
    """Serve one box until its socket closes. Never returns."""
    byte, doors, _, _ = socket.recv_fds(connection, 1, 3)
    if not byte:
        os._exit(0)
    wire = Wire(connection)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # the kernel shields pid 1 from signals of its namespace only if it has no handler
        Box(wire, joined, frozen, list(doors)).serve()
    except BaseException as error:
        connection.setblocking(True)
        wire.send(_broken(error))
        raise
    finally:
        os._exit(1)


def _broken(error: BaseException) -> dict[str, Any]:
    return {"id": 0, "broken": f"{type(error).__name__}: {error}"}


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
            Wire(connection).send(_broken(error))
        else:
            if pid == 0:
                control.close()
                box(connection, joined, frozen)
        for file in joined + frozen:
            os.close(file)
        connection.close()
