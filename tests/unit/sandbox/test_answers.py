"""A backend that answers late, twice, never or with what cannot be: each is an infrastructure failure, or dropped."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from boxed_program import run_program

from sparring.errors import SandboxError
from sparring.sandbox.box import BubblewrapBox
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.commands import BoxCommands
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.fault import Exhausted, PortTaken
from sparring.sandbox.roots import Root
from sparring.sandbox.server import Server
from sparring.types import BoxSpec

Answers = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]
END = {"end": "exited", "exit": 0, "wall": 0.0, "parts": [2, 0, 0, 0], "totals": [2, 0], "folder": 0, "running": False}


def send(writer: asyncio.StreamWriter, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    writer.write(struct.pack("<II", len(text), len(body)) + text + body)


class Backend(Server):
    """Server whose boxes answer by a function of each request."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(SandboxConfig())
        self._answers, self._tasks = answers, set[asyncio.Task[None]]()

    async def connect(self, joined: Any = (), frozen: Any = ()) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._tasks.add(asyncio.create_task(self._serve(theirs)))
        return ours

    async def _serve(self, link: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=link)
        try:
            await reader.readexactly(1)  # files of the control group come with it
            while True:
                sizes = struct.unpack("<II", await reader.readexactly(8))
                header = json.loads(await reader.readexactly(sizes[0]))
                await reader.readexactly(sizes[1])
                if "op" in header:
                    await self._answers(writer, header)
        except asyncio.IncompleteReadError:
            writer.close()


def with_backend(answers: Answers, work: Callable[[BubblewrapBox], Awaitable[Any]], grace_s: float = 20.0) -> Any:
    async def main() -> Any:
        pool = BubblewrapBoxes(SandboxConfig(servers=1, grace_s=grace_s))
        root = Root()
        box = BubblewrapBox(pool, root, BoxCommands(pool, BoxSpec(timeout_s=0.1), root, Backend(answers), (), None))
        try:
            async with asyncio.timeout(60):
                return await work(box)
        finally:
            await box.close()
            await pool.close()

    return asyncio.run(main())


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    async def twice(writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        for text in (b"1\n", b"2\n"):
            send(writer, {**END, "id": request["id"], "closed": True}, text)

    async def work(box: BubblewrapBox) -> list[str]:
        return [(await box.exec(["x"])).stdout for _ in range(3)]

    assert with_backend(twice, work) == ["1\n"] * 3


def test_an_answer_that_comes_late_is_dropped() -> None:
    """It belongs to a command that its caller has given up."""
    asked: list[int] = []

    async def late(writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        if request["op"] == "end":
            return
        asked.append(request["id"])
        if len(asked) == 2:
            for number in asked:
                send(writer, {**END, "id": number, "closed": True}, b"%d\n" % number)

    async def work(box: BubblewrapBox) -> str:
        first = asyncio.create_task(box.exec(["x"]))
        while not asked:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return (await box.exec(["y"])).stdout

    assert with_backend(late, work) == f"{asked[-1] if asked else 2}\n"


@pytest.mark.parametrize("word", ["exec", "start", "shell", "terminal", "connect", "read", "write", "download"])
def test_a_backend_that_never_answers_fails_by_name(word: str) -> None:
    calls: dict[str, Callable[[BubblewrapBox], Awaitable[Any]]] = {
        "exec": lambda box: box.exec(["x"]),
        "start": lambda box: box.start(["x"]),
        "shell": lambda box: box.shell(),
        "terminal": lambda box: box.terminal(["x"]),
        "connect": lambda box: box.connect(80),
        "read": lambda box: box.exec(["x"], stdin=bytes(1 << 21)),
        "write": lambda box: box.exec("x", timeout_s=0.2),
        "download": lambda box: box.python("1"),
    }

    async def never(writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        pass

    async def work(box: BubblewrapBox) -> None:
        for again in ("no answer", "no answer"):  # and the box is not asked again
            with pytest.raises(SandboxError, match=again):
                await calls[word](box)

    with_backend(never, work, grace_s=0.1)


def test_a_backend_that_ends_in_a_frame_is_lost() -> None:
    async def half(writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        writer.write(struct.pack("<II", 100, 100) + b"{")
        writer.close()

    async def work(box: BubblewrapBox) -> None:
        with pytest.raises(SandboxError, match="ended"):
            await box.exec(["x"])

    with_backend(half, work)


def test_input_waits_for_a_backend_that_takes_none() -> None:
    """Nothing grows: what is on its way is bounded, whatever is to be sent."""
    came = 0

    async def slow(writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        nonlocal came
        came += 1
        if came == 5:
            send(writer, {**END, "id": request["id"], "closed": True}, b"1\n")

    async def work(box: BubblewrapBox) -> str:
        return (await box.exec(["x"], stdin=bytes(64 << 20))).stdout

    assert with_backend(slow, work) == "1\n"
    assert came == 5  # the request, and pieces of 256 KiB up to a window of 1 MiB


def test_a_port_in_use_is_the_policy_s(bench: Any) -> None:
    async def main() -> None:
        pool = BubblewrapBoxes(SandboxConfig(servers=1), {})
        box: Any = await pool.take(BoxSpec(timeout_s=20.0))
        code = "import socket\ns = socket.create_server(('127.0.0.1', 8700))\nprint('up', flush=True)\ns.accept()"

        holder = await box.start(["python3", "-c", code])
        while "up" not in (await holder.output()).stdout:
            pass
        with pytest.raises(PortTaken, match="8700"):
            await run_program(box, ["true"])
        await holder.close()
        assert (await run_program(box, ["true"])).exit_code == 0
        await pool.close()

    asyncio.run(main())


def test_a_reaper_that_is_killed_takes_its_command_with_it(bench: Any) -> None:
    """Whatever it left, in sessions of its own too; beside it, others go on."""

    async def work(box: Any) -> None:
        other = await box.start("echo ready; exec sleep 3600")
        while "ready" not in (await other.output()).stdout:
            pass
        process = await box.start(
            "(setsid sleep 3000 > /dev/null &) ; kill -STOP $PPID; kill -9 $PPID; exec sleep 3000"
        )
        result = await process.wait()
        assert (result.end, result.exit_code) == ("killed", 137)
        left = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        told = (await box.exec(left)).stdout
        assert "sleep 3000" not in told.replace("sleep 3000 >", "") and "sleep 3600" in told
        assert not other.ended

    bench.box(work, BoxSpec(timeout_s=20.0, processes=32))


def test_a_fork_bomb_beside_others_ends_alone(bench: Any) -> None:
    async def work(box: Any) -> None:
        other = await box.start("echo ready; exec sleep 3600")
        while "ready" not in (await other.output()).stdout:
            pass
        bomb = "import os\nwhile True:\n    try: os.fork() or os.setsid()\n    except OSError: pass\n"
        result = await box.python(bomb, timeout_s=0.5)
        assert result.end == "timed out"
        shell = await box.shell()
        assert (await shell.run(":(){ :|:& }; :; sleep 3600", timeout_s=0.3)).end == "timed out"
        await shell.close()
        assert not other.ended
        count = "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))"
        assert (await box.python(count)).stdout == "4\n"  # pid 1, the other with its reaper, this one

    bench.box(work, BoxSpec(timeout_s=20.0, processes=48))


def test_places_for_commands_are_bounded(bench: Any) -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        box = await boxes.take(BoxSpec(timeout_s=20.0, processes=4))  # of which none counts that begins a command
        started = [await box.start(["sleep", "3600"]) for _ in range(64)]
        for more in (box.start(["true"]), box.exec(["true"]), box.shell(), box.read("file"), box.entries()):
            with pytest.raises(Exhausted, match="room for one more"):
                await more
        await started.pop().close()
        assert (await (await box.start(["true"])).wait()).exit_code == 0

    bench.run(work)


def test_files_of_the_parent_do_not_leak(bench: Any) -> None:
    async def work(box: Any) -> int:
        await box.exec(["true"])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            shell = await box.shell()
            await shell.run("true")
            await shell.close()
            with pytest.raises(ConnectionRefusedError):
                await box.connect(9)
        return len(os.listdir("/proc/self/fd")) - before

    assert bench.box(work) == 0
