"""A command of a box, and its reaper, each in a process of its own.

    box      pid 1 of the box's namespaces
      reaper    holds the box's capabilities; every process that a command leaves behind stays below it (prctl(2),
                PR_SET_CHILD_SUBREAPER); tells the box how the command ended
        command    a fork without capabilities and without any descriptor of the box

A command may kill its reaper, as one user's processes may kill each other: pid 1 then ends all that was below it.
Standard library only, for Python >= 3.9.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import gc
import math
import os
import resource
import signal
import struct
import sys
import termios
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from sparring.sandbox.inner.confine import become_subreaper, narrow, open_up
from sparring.sandbox.inner.files import run_on_files

ASKED, ANSWERED = 200, 201  # descriptors of a joined box's first command: to read from the other box, to write to it
SAID = 9  # descriptor over which a shell tells that a text has ended
OUT_OF_MEMORY = signal.SIGRTMAX  # sent to itself by Python code after an uncaught MemoryError. The box believes it if
NO_MEMORY = -1  #                      that code held more than 1 / GOOD_PART of its memory limit.
GOOD_PART = 4
CPUS = len(os.sched_getaffinity(0))
ARMED, NO_FOLDER, ENDED = b"!", b"d", b"e"
STATUS = struct.Struct("<ciq")
"""Format of the reaper's report `ENDED`: the command's wait status, and its peak memory in KiB. The command itself
reports `ARMED` once its restrictions hold, or `NO_FOLDER` and errno in a byte."""


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


def reap(request: dict[str, Any], body: bytes, limits: dict[str, Any], files: tuple[int, ...], report: int) -> NoReturn:
    """Turn this fork of the box into a command's reaper, start the command and wait for all that it leaves. Never
    returns.

    Args:
        files: the command's standard streams, and for a shell its `SAID`.
    """
    try:
        become_subreaper()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            command(request, body, limits, files, report)
        if report != 3:
            os.dup2(report, 3)
        os.closerange(0, 3)
        os.closerange(4, 1 << 16)
        while True:
            ended, status, used = os.wait4(-1, 0)
            if ended == pid:
                os.write(3, STATUS.pack(ENDED, status, used.ru_maxrss))
    finally:
        os._exit(0)  # no child is left


def command(
    request: dict[str, Any], body: bytes, limits: dict[str, Any], files: tuple[int, ...], report: int
) -> NoReturn:
    """Turn this process into a restricted command, run it and exit. Never returns. Tells `report` once the restrictions
    hold."""
    status = 1 if "argv" in request or request["op"] == "python" else errno.EIO
    try:
        _prepare(request, limits, files, report)
        gc.enable()
        if request["op"] == "python":
            # not before: a SIGINT of another command would raise an exception that looks like a failed confinement
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = _run_python(body)
        elif "argv" in request:
            status = _run_program(request["argv"])
        else:
            status = run_on_files(request, limits["furnished"].folder)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        _flush()
        if status == NO_MEMORY:
            os.kill(os.getpid(), OUT_OF_MEMORY)
        os._exit(status)


def _prepare(request: dict[str, Any], limits: dict[str, Any], files: Sequence[int], report: int) -> None:
    for door in limits["doors"]:  # into the control group
        os.pwrite(door, b"0", 0)
    if len(files) > 3:  # nothing of ours may lie where it is put
        report, *files = [fcntl.fcntl(file, fcntl.F_DUPFD, SAID + 1) for file in (report, *files)]
    for number, file in enumerate(files):
        os.dup2(file, (0, 1, 2, SAID)[number])
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if request.get("columns"):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # machines such as Java's reserve more than they use; a group counts what is used
    is_unlimited = request["op"] == "program" or limits["doors"] and limits["furnished"].tree.is_rooted
    address = resource.RLIM_INFINITY if is_unlimited else limits["address"]
    seconds = request["timeout"]
    cpu_s = resource.RLIM_INFINITY if seconds is None else math.ceil(seconds * CPUS) + 2
    narrow(address, cpu_s, limits["processes"] + 1 + request["reapers"], limits["furnished"])
    try:
        if "cwd" in request:  # else it begins where it is, even if a command has closed or removed that folder
            os.chdir(request["cwd"] or ".")
            os.environ["PWD"] = os.getcwd()
    except (OSError, ValueError) as error:  # no folder's name holds a NUL
        os.write(report, NO_FOLDER + bytes([getattr(error, "errno", errno.ENOENT)]))
        os._exit(1)
    os.write(report, ARMED)
    said = len(files) > 3
    os.closerange(3, SAID if said else ASKED)
    os.closerange(SAID + 1, ASKED)
    os.closerange(ANSWERED + 1 if request["joined"] else ASKED, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["files"], limits["files"]))
    if "argv" in request or request["op"] == "python":
        open_up()  # file operations stay closed: other commands would write into their memory
    if request["op"] == "program":
        os.environ.clear()
    os.environ.update(request.get("environment") or {})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
