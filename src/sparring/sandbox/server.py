"""Parent's side of a fork server: starts bubblewrap, sends it sockets, and restarts it after its death."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sparring.errors import SandboxError
from sparring.open_files import allow_files
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.mounts import arguments_of, box_identity, check_box_user, hidden_homes, mounts_of_program
from sparring.sandbox.roots import SHOWN, Root, site_packages

INNER_UID = 1000
HAND_OVER_S = 20.0
"""Seconds that a server may take to accept a box."""
KILLED_FIRST = 500
"""Out-of-memory score of boxes above that of this process; their commands have 1000."""
SETARCH = (
    "/usr/bin/setarch"  # with fixed addresses, code that prints `<map object at 0x...>` prints the same in every run
)
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "PYTHONNOUSERSITE": "1",  # keeps a usercustomize.py that a program left in HOME out of the world's commands
}
PROGRAM_FOLDERS = ("/agent",)
"""Additional folders of boxes that run programs: their home."""
ETC = {
    "/etc/passwd": "root:x:0:0:root:{home}:/bin/sh\nagent:x:{user}:{user}:agent:{home}:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:{user}:\n",
    "/etc/hosts": "127.0.0.1 localhost box\n",
}
"""Files that tell commands their user and host."""
INNER = (
    *("filter", "calls", "root", "confine", "stand_ins", "files", "processes"),
    *("wire", "command", "run", "shell", "boxes"),
)
"""Modules of the program inside bubblewrap, each after those that it imports."""
# The program inside comes in an open file, because bubblewrap's user may be unable to read our folder.
BOOT = """
import json, sys, types
with open(int(sys.argv[1])) as file:
    modules = json.load(file)
for name, text in modules.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.serve()
"""


def find_python(config: SandboxConfig) -> str:
    """Return the interpreter for the boxes: the configured one, or the system's, or the base interpreter of the one
    that runs Sparring."""
    if config.python != "auto":
        return config.python
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return os.path.realpath(path)
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def command_line(config: SandboxConfig, mounts: Mapping[str, str] | None = None, root: Root = Root()) -> list[str]:
    """Return the bubblewrap command of one fork server, up to the number of the open file with the program inside. From
    the host, boxes see only /usr, its loader's tables, the interpreter and the mounts. Boxes of an image see only
    devices: the rest is for the server itself.

    Args:
        mounts: files and folders of the host, by their path in the boxes.

    Raises:
        BadInput: the interpreter cannot be mounted (`mounts_of_program`).
    """
    python = find_python(config)
    arguments = [config.bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    arguments += ["--uid", str(INNER_UID), "--gid", str(INNER_UID), "--hostname", "box", "--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    for path in ("/etc/alternatives", "/etc/ld.so.cache"):
        arguments += ["--ro-bind-try", path, path]
    # Python's packages of the host are the host's business; a program that is installed there needs them
    packages = map(str, site_packages()) if root.kind == "python" and mounts is None else ()
    for folder in (*hidden_homes(), *packages):
        arguments += ["--tmpfs", folder, "--remount-ro", folder]
    for number, folder in enumerate(map(str, root.folders)):
        arguments += ["--ro-bind", folder, f"{SHOWN}/{number}"]
    arguments += arguments_of({**mounts_of_program(Path(python), "sandbox.python"), **(mounts or {})})
    for device in ("null", "zero", "full", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    arguments += ["--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc"]
    for folder in ("/box", "/tmp", "/mnt", "/dev/shm", "/dev/pts", *(() if mounts is None else PROGRAM_FOLDERS)):
        arguments += ["--dir", folder]
    arguments += ["--symlink", "pts/ptmx", "/dev/ptmx", "--remount-ro", "/", "--chdir", "/"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    if os.access(SETARCH, os.X_OK):
        arguments += [SETARCH, "-R"]
    return [*arguments, python, "-s", "-S", "-B", "-c", BOOT]


def _program_inside(given: ExitStack) -> int:
    folder = Path(__file__).parent / "inner"
    texts = {f"sparring.sandbox.inner.{name}": (folder / f"{name}.py").read_text(encoding="utf-8") for name in INNER}
    return _readable(json.dumps(texts), given)


def _readable(text: str, given: ExitStack) -> int:
    """Return an open file that contains a text, until the stack closes it."""
    file = os.memfd_create("boxes")
    given.callback(os.close, file)
    os.pwrite(file, text.encode(), 0)
    return file


@contextmanager
def killed_first() -> Iterator[None]:
    """Context in which new processes are the first that the kernel's out-of-memory killer takes. Their children inherit
    this; if this process is root, they cannot undo it (proc_pid_oom_score_adj(5))."""
    file = Path("/proc/self/oom_score_adj")
    try:
        before = file.read_text()
        file.write_text(str(max(KILLED_FIRST, int(before))))
    except OSError:
        yield  # no /proc that can be written
        return
    try:
        yield
    finally:
        file.write_text(before)


class Server:
    """Fork server of one event loop; not thread-safe.

    Args:
        mounts: files and folders of the host that programs need, by their path in the boxes; None: the boxes run no
            programs.
        root: root of the boxes. The server can make boxes of every image whose layers lie in the same folders.
    """

    def __init__(self, config: SandboxConfig, mounts: Mapping[str, str] | None = None, root: Root = Root()) -> None:
        allow_files()  # descriptors under way of all boxes count against what this process passes
        self._config = config
        self._mounts = mounts
        self._root = root
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors: io.FileIO | None = None

    @property
    def pid(self) -> int | None:
        """Process id of bubblewrap; None before the first box."""
        return None if self._process is None else self._process.pid

    async def connect(self, joined: Sequence[int] = (), frozen: Sequence[int] = ()) -> socket.socket:
        """Start a box and return the parent's end of its socket; start the server first if it is not running.

        Args:
            joined: two pipe ends for the box's first command, or none: one to read from another box, one to write to
                it.
            frozen: descriptors of frozen layers of another box.

        Raises:
            SandboxError: bubblewrap could not be started, or this process has too many open files.
        """
        try:
            local, remote = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"sandbox: no socket for a box: {error}") from error
        with remote, ExitStack() as unfinished:
            unfinished.callback(local.close)
            files = [remote.fileno(), *joined, *frozen]
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                try:
                    await self._hand_over(files, len(frozen))
                except (BrokenPipeError, ConnectionResetError):  # the server has just died
                    self._start()
                    await self._hand_over(files, len(frozen))
            except OSError as error:
                raise SandboxError(f"sandbox: the fork server takes no boxes: {error}{self.last_words()}") from error
            unfinished.pop_all()
        return local

    async def _hand_over(self, files: list[int], num_frozen: int) -> None:
        assert self._control is not None
        ends = asyncio.get_running_loop().time() + HAND_OVER_S
        while True:
            try:
                socket.send_fds(self._control, [bytes([num_frozen])], files)
                return
            except OSError as error:
                # EAGAIN: the server is still starting, and its queue is full. ETOOMANYREFS: others have as many
                # descriptors under way as this user may
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS) or asyncio.get_running_loop().time() > ends:
                    raise
                await asyncio.sleep(0.005)

    def _start(self) -> None:
        self.close()
        program = shutil.which(self._config.bwrap)
        if program is None:
            raise SandboxError(f"sandbox: no program {self._config.bwrap!r}")
        check_box_user(self._config.user)
        line = command_line(self._config, self._mounts, self._root)
        home = ENVIRONMENT["HOME"] if self._mounts is None else PROGRAM_FOLDERS[0]
        with ExitStack() as unfinished, ExitStack() as given:  # what is given is closed here once bubblewrap has it
            unfinished.callback(self.close)
            files = [_program_inside(given)]
            for path, text in ETC.items():
                files.append(_readable(text.format(user=INNER_UID, home=home), given))
                line[1:1] = ["--ro-bind-data", str(files[-1]), path]
            self._control, remote = socket.socketpair()
            given.enter_context(remote)
            self._control.setblocking(False)
            errors, theirs_errors = os.pipe()
            given.callback(os.close, theirs_errors)
            os.set_blocking(errors, False)
            self._errors = io.FileIO(errors)
            try:
                with killed_first():
                    self._process = subprocess.Popen(
                        [*line, str(files[0])],
                        pass_fds=files,
                        executable=program,
                        stdin=remote.fileno(),
                        stdout=theirs_errors,
                        stderr=theirs_errors,
                        cwd="/",
                        env={},  # the run's, with its keys, would stay readable in /proc
                        start_new_session=True,  # Ctrl-C in a terminal goes to the run, which ends its boxes itself
                        **box_identity(self._config.user),
                    )
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxError(f"sandbox: {program} does not start: {error}") from error
            unfinished.pop_all()

    def last_words(self) -> str:
        """Return the last output and the exit status of bubblewrap or the program inside, as the end of a message, or
        ""."""
        if self._process is None or self._errors is None:
            return ""
        text = (self._errors.read(4096) or b"").decode("utf-8", "replace").strip()
        status = self._process.poll()
        return (f", exit status {status}" if status is not None else "") + (f": {text}" if text else "")

    def close(self) -> None:
        """Kill the server with all its boxes. The next `connect` restarts it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._process.poll() is None:
                # the group, because a bubblewrap killed while it starts leaves a child that waits for it for ever
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
