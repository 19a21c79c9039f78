"""A table: every operation of a box x what the policy may have done to what it needs. In no cell is it a failure of the
machine, which would be tried again and never scored (law 6); where the machine is at fault, it is never the policy's.

Every public method of a box, of what lives on in one, and of the tools has a row.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from suite import short_of

from sparring.envs.base import Env
from sparring.envs.rubrics.code import passes
from sparring.envs.tools.bash import BashTool
from sparring.envs.tools.editor import EditorTool
from sparring.envs.tools.python import PythonTool
from sparring.envs.tools.terminal import TerminalTool
from sparring.errors import PolicyFailure, SandboxError
from sparring.rollout.guarded_env import GuardedEnv
from sparring.sandbox.box import BubblewrapBox
from sparring.sandbox.fault import BoxRequest
from sparring.sandbox.files import FileAccess
from sparring.sandbox.handles import BoxHandles, BoxProcess, BoxShell, BoxTerminal
from sparring.types import BoxSpec, Message, Task, ToolCall

PREPARED = {"file": b"x", "folder/file": b"x", "folder/other": b"x"}
PATHS = ("file", "folder/file")
SERVICE = """
import socket, struct, sys, time
listening = socket.create_server(("127.0.0.1", 8000 + int(sys.argv[1])), backlog=0)
if sys.argv[1] == "1":
    held = [socket.socket() for _ in range(4)]
    for one in held: one.setblocking(False); one.connect_ex(listening.getsockname())
    print("up", flush=True); time.sleep(60)
print("up", flush=True)
while True:
    link, _ = listening.accept()
    if sys.argv[1] == "2": link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if sys.argv[1] == "3": held = link; time.sleep(60)
    link.close()
"""
"""Services at ports 8001: its queue is full; 8002: it resets; 8003: it never answers."""

FULL = "head -c 9000000 /dev/zero > all; for n in $(seq 40); do head -c 65536 /dev/zero >> all; done; "
SWAPS = """
import os
print("up", flush=True)
while True:
    for path in ("file", "folder"):
        os.rename(path, "aside")
        for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/usr", path), lambda path: open(path, "wb").truncate(9 << 20)):
            make(path)
            (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
        os.rename("aside", path)
"""
OTHERS_OF = """
import os, resource
print("up", flush=True)
while True:
    for pid in {{int(name) for name in os.listdir("/proc") if name.isdigit()}} - {{1, os.getpid()}}:
        try:
            {}
        except OSError: pass
"""
OVERLAYS = """
import os
print("up", flush=True)
{}:
    for name in "opaque redirect origin impure nlink upper uuid metacopy protattr whiteout xwhiteouts verity".split():
        for path in (".", "file", "folder", "/tmp"):
            try: os.setxattr(path, "user.overlay." + name, b"y")
            except OSError: pass
"""
FORKS = """
import os, time
try:
    while os.fork(): pass
except OSError: print("up", flush=True)
time.sleep(60)
"""
STATES = {
    "closed": "chmod 0 file folder/* folder /tmp /dev/shm . ",
    "read-only": "chmod 400 file folder/*; chmod 500 folder . /tmp",
    "full": FULL,
    "without inodes": "python3 -c 'import os\nfor n in range(9999): os.mkdir(str(n))'",
    "a link elsewhere": "rm -r file folder; ln -s /usr/bin/env file; ln -s /usr folder",
    "a link to nowhere": "rm -r file folder; ln -s /nowhere/at/all file; ln -s gone folder",
    "a link to itself": "rm -r file folder; ln -s file file; ln -s folder folder",
    "a link to a process": "rm -r file folder; ln -s /proc/self/mem file; ln -s /proc/self folder",
    "a pipe": "rm -r file folder; mkfifo file folder",
    "a socket": "rm -r file folder; python3 -c 'import socket\nfor name in (\"file\", \"folder\"): "
    "socket.socket(socket.AF_UNIX).bind(name)'",
    "swapped": "mv folder aside; mv file folder; mv aside file",
    "gone": "rm -r file folder",
    "empty folders": "rm -r file folder; mkdir -p file folder/file",
    "large": "truncate -s 9M file folder/file folder/other",
    "full of attributes": "python3 -c 'import os\nfor n in range(9999):\n open(str(n), \"w\").close()\n"
    " for at in range(99): os.setxattr(str(n), f\"user.{at}\", bytes(4000))'",
    "an access list": "python3 -c 'import os, struct\nfor kind in (\"access\", \"default\"): os.setxattr(\".\", "
    "\"system.posix_acl_\" + kind, struct.pack(\"<IHHIHHIHHI\", 2, 1, 0, 2**32 - 1, 4, 0, 2**32 - 1, 32, 0, 2**32 - 1))'",
    "times out of range": "python3 -c 'import os\nfor path in (\"file\", \"folder\", \".\"): os.utime(path, ns=(-2**63, 2**63 - 1))'",
    "special modes": "chmod 7000 file folder . /tmp",
    "names of one file": "python3 -c 'import os\nfor n in range(9999): os.link(\"file\", str(n))'",
    "full devices": "rm -r file folder/file; ln -s /dev/full file; ln -s /dev/full folder/file",
    "a link to a setting": "rm -r file folder/file; ln -s /proc/sys/kernel/core_pattern file; ln -s /proc/self/clear_refs folder/file",
    "a link to a terminal": "rm -r file folder/file; ln -s /dev/tty file; ln -s /dev/ptmx folder/file",
    "a link to a descriptor": "rm -r file folder/file; ln -s /proc/self/fd/1 file; ln -s /proc/self/fd/3 folder/file",
    "deeper than a path": "n=$(printf %0200d 0); for i in $(seq 99); do mkdir $n && cd $n; done",
    "terminals in a ring": "python3 -c 'import os, socket\npairs = [os.openpty() for _ in range(99)]\n"
    "a, b = socket.socketpair()\nfor pair in pairs: socket.send_fds(a, [b\"x\"], pair)\n"
    "socket.send_fds(b, [b\"x\"], [a.fileno()]); socket.send_fds(a, [b\"x\"], [b.fileno()])'",
    "odd names": "for n in $(seq 3); do touch $(printf \"\\\\377$n\\n\"); done; touch $(printf %0255d 0); ln -s $(printf %03000d 0) z",
}  # fmt: skip
RUNNING = {
    "swapped while it is read": ["python3", "-c", SWAPS],
    "all processes taken": ["python3", "-c", FORKS],
    "others limited": ["python3", "-c", OTHERS_OF.format("for what in range(16): resource.prlimit(pid, what, (0, 0))")],
    "others slowed": [
        "python3",
        "-c",
        OTHERS_OF.format("os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))"),
    ],
    "others signalled": [
        "python3",
        "-c",
        OTHERS_OF.format("for number in (1, 2, 10, 15, 17, 18, 24, 25, 34, 64): os.kill(pid, number)"),
    ],
    "attributes that overlays have": ["python3", "-c", OVERLAYS.format("while True")],
}


class Tools(PythonTool, BashTool, EditorTool, TerminalTool, Env):
    """A world with every tool of a box."""


def calls(*tools: tuple[str, Mapping[str, Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """An operation: these calls of a world's tools, within the guard of every rollout."""

    async def step(box: Any, kept: Any) -> None:
        world = GuardedEnv(Tools)
        await world.open(Task(id="t", env="Tools", messages=(), box=box.spec), box)
        for name, arguments in tools:
            await world.step(Message(role="assistant", tool_calls=(ToolCall(id="c", name=name, arguments=arguments),)))

    return step


async def carry(box: Any, kept: Any) -> None:
    """Carry the tree to another box."""
    other = await box.fresh()
    await other.upload(await box.download())


async def verify(box: Any, kept: Any) -> None:
    verifier = await box.verifier(PATHS)
    for path in PATHS:
        await verifier.read(path)
    await verifier.close()


async def fork(box: Any, kept: Any) -> None:
    forked = await box.fork(await box.snapshot(ends=True))
    await forked.write("new/file", b"x")
    await forked.close()


def handle(kind: type[Any], name: str, *arguments: Any) -> Callable[[Any, Any], Awaitable[Any]]:
    async def work(box: Any, kept: Any) -> None:
        value = getattr(kept[kind], name)(*arguments)
        if inspect.isawaitable(value):
            await value

    return work


async def nothing(box: Any, kept: Any) -> None:
    """Do nothing: the method reads what is in memory."""


ROWS: dict[tuple[type[Any], str], Any] = {
    (BubblewrapBox, "exec"): lambda box, _: box.exec("cat file; echo said"),
    (BubblewrapBox, "exec, cwd"): lambda box, _: box.exec("pwd", cwd="folder"),
    (BubblewrapBox, "python"): lambda box, _: box.python("print(1)"),
    (BoxHandles, "start"): lambda box, _: box.start("true"),
    (BoxHandles, "start, cwd"): lambda box, _: box.start("true", cwd="folder"),
    (BubblewrapBox, "shell"): lambda box, _: box.shell(),
    (BubblewrapBox, "shell, cwd"): lambda box, _: box.shell(cwd="folder"),
    (BoxHandles, "shell"): lambda box, _: box.handles.shell(),
    (BoxHandles, "terminal"): lambda box, _: box.terminal(["true"]),
    (FileAccess, "read"): lambda box, _: box.read("file"),
    (FileAccess, "read, folder"): lambda box, _: box.read("folder/file"),
    (FileAccess, "read_plain"): lambda box, _: box.files.read_plain("folder/file", 100),
    (FileAccess, "write"): lambda box, _: box.write("file", bytes(1000)),
    (FileAccess, "write, folder"): lambda box, _: box.write("folder/new/file", bytes(1000)),
    (FileAccess, "entries"): lambda box, _: box.entries("folder"),
    (FileAccess, "entries, all"): lambda box, _: box.entries(),
    (FileAccess, "upload"): lambda box, _: box.upload({"folder/file": bytes(1000), "folder/new/file": b"x"}),
    (FileAccess, "upload, folder"): lambda box, _: box.upload({"file": b"x", "a/b": b"y"}, "folder"),
    (FileAccess, "download"): lambda box, _: box.download("folder"),
    (FileAccess, "download, all"): lambda box, _: box.download(),
    (FileAccess, "remove"): lambda box, _: box.files.remove("folder/other"),
    (BubblewrapBox, "fresh"): carry,
    (BubblewrapBox, "beside"): lambda box, _: box.beside(BoxSpec()),
    (BubblewrapBox, "converse"): lambda box, _: passes("def f(x): return x", "assert f(1) == 1", box),
    (BubblewrapBox, "verifier"): verify,
    (BoxHandles, "connect"): lambda box, _: box.connect(8000),
    (BoxProcess, "output"): handle(BoxProcess, "output"),
    (BoxProcess, "write"): handle(BoxProcess, "write", b"x"),
    (BoxProcess, "wait"): handle(BoxProcess, "wait", 0.0),
    (BoxProcess, "kill"): handle(BoxProcess, "kill"),
    (BoxProcess, "ended"): nothing,
    (BoxProcess, "give_up"): handle(BoxProcess, "give_up"),
    (BoxProcess, "close"): handle(BoxProcess, "close"),
    (BoxShell, "begun"): handle(BoxShell, "begun"),
    (BoxShell, "run"): handle(BoxShell, "run", "cat file; echo said"),
    (BoxTerminal, "type"): handle(BoxTerminal, "type", "cat file\r"),
    (BoxTerminal, "shows"): handle(BoxTerminal, "shows", "cat", 0.1),
    (BoxTerminal, "quiet"): handle(BoxTerminal, "quiet", 0.0, 0.1),
    (BoxTerminal, "resize"): handle(BoxTerminal, "resize", 90, 30),
    (BoxTerminal, "wait"): handle(BoxTerminal, "wait", 0.0),
    (BoxTerminal, "see"): nothing,
    (BoxTerminal, "screen"): handle(BoxTerminal, "screen"),
    (Tools, "python"): calls(("python", {"code": "print(1)"})),
    (Tools, "bash"): calls(("bash", {"command": "cat file"})),
    (Tools, "view"): calls(("view", {"path": "file"}), ("view", {"path": "folder"}), ("view", {"path": "."})),
    (Tools, "create"): calls(("create", {"path": "folder/file", "text": "x"})),
    (Tools, "replace"): calls(("replace", {"path": "file", "old": "x", "new": "y"})),
    (Tools, "insert"): calls(("insert", {"path": "file", "after_line": 0, "text": "y"})),
    (Tools, "type"): calls(("type", {"keys": ["cat file", "Enter"]})),
    (BubblewrapBox, "snapshot"): lambda box, _: box.snapshot(ends=True),
    (BubblewrapBox, "snapshot_prepared"): lambda box, _: box.snapshot_prepared(),
    (BubblewrapBox, "fork"): fork,
    (FileAccess, "read, fork"): lambda box, _: box.read("file"),
    (BubblewrapBox, "close"): lambda box, _: box.close(),
}
"""Operations in this order, in one box. `program` has tests of its own (`test_shown_files.py`)."""
BOX = (BubblewrapBox, FileAccess, BoxHandles)
"""Classes whose operations a box has."""
OTHERS = {"program"}


def test_every_operation_has_a_row() -> None:
    for kind in (*BOX, BoxProcess, BoxShell, BoxTerminal):
        names = {name for name, value in inspect.getmembers(kind) if not name.startswith("_")}
        rows = {name.partition(",")[0] for row, name in ROWS if row in kind.__mro__ or issubclass(row, kind.__mro__[1])}
        assert {name for name in names if callable(getattr(kind, name))} - rows - OTHERS == set(), kind
    tools = {spec.name for spec in Tools().tools}
    assert tools == {name for kind, name in ROWS if kind is Tools}


async def prepared(box: Any) -> dict[type[Any], Any]:
    """Fill the box, and begin what lives on."""
    await box.upload(PREPARED)
    await box.snapshot()
    return {
        BoxProcess: await box.start(["cat"]),
        BoxShell: await box.shell(),
        BoxTerminal: await box.terminal(["sh"]),
    }


async def wrong(box: Any, kept: Any) -> list[str]:
    """The cells of a box that would become a failure of the machine."""
    found = []
    for (kind, name), work in ROWS.items():
        try:
            async with asyncio.timeout(20):
                await work(box, kept)
        except PolicyFailure:
            pass
        except Exception as error:
            found.append(f"{kind.__name__}.{name}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("state", short_of(STATES, ["closed", "full", "a link elsewhere", "swapped", "gone"]))
def test_what_the_policy_did_is_never_the_machines(in_box: Any, state: str) -> None:
    async def work(box: Any) -> list[str]:
        kept = await prepared(box)
        await box.exec(STATES[state], timeout_s=20.0)
        return await wrong(box, kept)

    assert in_box(work, processes=16, timeout_s=1.0) == []


@pytest.mark.parametrize("state", short_of(RUNNING, ["swapped while it is read"]))
def test_what_the_policy_does_meanwhile_is_never_the_machines(in_box: Any, state: str) -> None:
    async def work(box: Any) -> list[str]:
        kept = await prepared(box)
        running = await box.start(RUNNING[state])
        while "up" not in (await running.output()).stdout:
            await asyncio.sleep(0)
        return await wrong(box, kept)

    assert in_box(work, processes=16, timeout_s=1.0) == []


def test_attributes_that_overlays_have_are_the_policys(in_box: Any) -> None:
    """Below the first snapshot a command sets them itself; above it the next overlay reads them, and answers EIO."""

    async def work(box: Any) -> list[str]:
        await box.upload(PREPARED)
        await box.exec(["python3", "-c", OVERLAYS.format("if True")])
        await box.snapshot()
        return [cell for cell in await wrong(box, {}) if cell.startswith((*(kind.__name__ for kind in BOX), "Tools"))]

    assert in_box(work, timeout_s=2.0) == []


@pytest.mark.parametrize("path", ["\ud800", "\udcff\n"])
def test_a_name_that_is_no_text_is_shown(in_box: Any, path: str) -> None:
    tools = calls(("view", {"path": path}), ("create", {"path": path, "text": "x"}), ("view", {"path": "."}))
    in_box(lambda box: tools(box, None))


async def asked(link: Any) -> None:
    """Ask a service by asyncio, as a world does that forgets what it may do."""
    reader, writer = await asyncio.open_connection(sock=link)
    try:
        writer.write(b"x" * 99)
        await reader.readexactly(2)
        await reader.read()
    finally:
        writer.transport.abort()


SERVICES = {0: ConnectionRefusedError, 1: TimeoutError, 2: ConnectionResetError, 3: TimeoutError}


@pytest.mark.parametrize("number", short_of(SERVICES, [0, 2, 3]))
def test_a_service_fails_as_the_policys(in_box: Any, number: int) -> None:
    async def work(box: Any) -> None:
        service = await box.start(["python3", "-c", SERVICE, str(number)])
        while number and "up" not in (await service.output()).stdout:
            await asyncio.sleep(0)
        with pytest.raises(SERVICES[number]) as blocking:
            link = await box.connect(8000 + number)
            await asyncio.to_thread(lambda: (link.sendall(b"x" * 99), link.recv(2), link.recv(1)))
        assert isinstance(blocking.value, PolicyFailure)
        if number != 3:  # a world that waits by asyncio sets the time
            with pytest.raises(SERVICES[number]) as awaited:
                await asked(await box.connect(8000 + number))
            assert isinstance(awaited.value, PolicyFailure)

    in_box(work, timeout_s=0.5)


def test_what_no_command_caused_is_not_the_policys(in_box: Any) -> None:
    async def work(box: Any) -> None:
        with pytest.raises(ConnectionRefusedError) as refused:
            await (await box.fresh()).connect(8000)
        assert not isinstance(refused.value, PolicyFailure)
        for name, call in {"read": box.read("none"), "upload": box.upload({"x": bytes(1 << 20)}), "entries": box.entries("x"),
                           "cwd": box.exec("true", cwd="none"), "write": box.write("/usr/x", b"")}.items():  # fmt: skip
            with pytest.raises(OSError) as raised:
                await call
            assert not isinstance(raised.value, PolicyFailure), name
        await box.exec("true")
        with pytest.raises(OSError, match="Read-only") as closed:
            await box.write("/usr/x", b"")
        assert not isinstance(closed.value, PolicyFailure)

    in_box(work, disk_bytes=1 << 18)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENFILE])
def test_a_command_that_cannot_begin_beside_no_other_is_the_machines(number: int) -> None:
    refused = {"refused": number}
    alone = BoxRequest({"op": "exec"}, used=True, crowded=False).refusal(refused)
    beside = BoxRequest({"op": "exec"}, used=True, crowded=True).refusal(refused)
    assert isinstance(alone, SandboxError)
    assert isinstance(beside, SandboxError if number == errno.ENFILE else PolicyFailure)


def test_a_box_that_was_killed_is_the_machines(in_box: Any) -> None:
    async def work(box: Any) -> None:
        kept = await prepared(box)
        os.kill(box.commands.server.pid, signal.SIGKILL)
        for (kind, name), work in ROWS.items():
            if kind in BOX and name not in ("beside", "cancel", "close", "fork", "fresh"):
                with pytest.raises(SandboxError):
                    await work(box, kept)

    in_box(work)


@pytest.mark.parametrize("tool", short_of(["bash", "type"], ["bash"]))
def test_a_shell_that_is_ended_again_and_again_takes_no_place(in_box: Any, tool: str) -> None:
    """A box has 64 places. One more command than it has was refused as the world's own mistake, which ends a run."""
    arguments = {"command": "exit 3"} if tool == "bash" else {"keys": ["exit", "Enter"]}
    in_box(lambda box: calls(*[(tool, arguments)] * 66)(box, None), timeout_s=2.0)


def test_what_a_program_does_not_read_is_not_waited_for_without_end(in_box: Any) -> None:
    async def work(box: Any) -> None:
        sleeping = await box.start(["sleep", "60"])
        terminal = await box.terminal("stty raw -echo; echo up; sleep 60")
        assert await terminal.shows("up", 20)
        for write in (sleeping.write, terminal.type):
            with pytest.raises(TimeoutError) as late:
                await write(bytes(3 << 20))
            assert isinstance(late.value, PolicyFailure)

    in_box(work, timeout_s=0.2)
