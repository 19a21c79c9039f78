"""How boxes, commands, servers and the parent begin and end."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from refusals import refused_at

from sparring.errors import SandboxError
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.server import Server
from sparring.types import BoxSpec

SPEC = BoxSpec(timeout_s=20.0)
FOREVER = BoxSpec(timeout_s=3600.0)
Family = Callable[[int], list[int]]


def with_boxes(config: SandboxConfig, work: Callable[[BubblewrapBoxes], Any]) -> Any:
    async def main() -> Any:
        boxes = BubblewrapBoxes(config)
        try:
            async with asyncio.timeout(60):
                return await work(boxes)
        finally:
            await boxes.close()

    return asyncio.run(main())


async def running(family: Family, pid: int, count: int) -> list[int]:
    """The descendants, as soon as there are so many: bubblewrap, its server, a box, a command."""
    while len(found := family(pid)) < count:
        await asyncio.sleep(0)
    return found


def all_end(pids: list[int]) -> bool:
    """Whether these processes end within 30 s."""
    poll = select.poll()
    waiting = set()
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll.register(descriptor, select.POLLIN)
        waiting.add(descriptor)
    while waiting and (ready := poll.poll(30_000)):
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            os.close(descriptor)
            waiting.discard(descriptor)
    return not waiting


def test_nothing_starts_before_the_first_command(family: Family) -> None:
    async def work(boxes: BubblewrapBoxes) -> tuple[list[int], list[int]]:
        box = await boxes.take(SPEC)
        before = family(os.getpid())
        await box.python("1")
        return before, family(os.getpid())

    before, after = with_boxes(SandboxConfig(servers=2), work)
    assert (len(before), len(after)) == (0, 3)
    assert all_end(after)


def test_closing_a_box_ends_its_processes(family: Family) -> None:
    async def work(boxes: BubblewrapBoxes) -> bool:
        box = await boxes.take(FOREVER)
        command = asyncio.create_task(box.python("while True: pass"))
        tree = await running(family, os.getpid(), 4)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await command
        with pytest.raises(SandboxError, match="closed"):
            await box.python("1")
        return all_end(tree[2:])

    assert with_boxes(SandboxConfig(servers=1), work)


def test_cancelling_kills_the_command_and_keeps_the_box(family: Family) -> None:
    async def work(boxes: BubblewrapBoxes) -> str:
        box = await boxes.take(FOREVER)
        await box.write("kept", b"")
        for wait in (True, False):  # once under way, once at some earlier moment
            command = asyncio.create_task(box.python("import os; os.fork()\nwhile True: pass"))
            await (running(family, os.getpid(), 5) if wait else asyncio.sleep(0))
            command.cancel()
            with pytest.raises(asyncio.CancelledError):
                await command
        return (await box.python("import os; print(os.listdir('.'), os.listdir('/proc').count('1'))")).stdout

    assert with_boxes(SandboxConfig(servers=1), work) == "['kept'] 1\n"


def test_the_death_of_a_server_is_an_infrastructure_failure_and_heals(family: Family) -> None:
    async def work(boxes: BubblewrapBoxes) -> str:
        idle, busy = await boxes.take(SPEC), await boxes.take(FOREVER)
        await idle.python("1")
        command = asyncio.create_task(busy.python("while True: pass"))
        os.kill((await running(family, os.getpid(), 5))[0], signal.SIGKILL)
        with pytest.raises(SandboxError):
            await command
        with pytest.raises(SandboxError):
            await idle.python("1")
        return (await (await boxes.take(SPEC)).python("print('served')")).stdout

    assert with_boxes(SandboxConfig(servers=1), work) == "served\n"


def test_a_box_killed_from_outside_is_an_infrastructure_failure_of_that_box_only(family: Family) -> None:
    async def work(boxes: BubblewrapBoxes) -> str:
        box, other = await boxes.take(SPEC), await boxes.take(SPEC)
        await box.python("1")
        os.kill(family(os.getpid())[2], signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended"):
            await box.python("1")
        return (await other.python("print('served')")).stdout

    assert with_boxes(SandboxConfig(servers=1), work) == "served\n"


def test_commands_beyond_the_concurrency_wait_in_order() -> None:
    code = "import time\nstart = time.monotonic()\nsum(range(10**6))\nprint(start, time.monotonic())"

    async def work(boxes: BubblewrapBoxes) -> list[list[float]]:
        taken = [await boxes.take(SPEC) for _ in range(6)]
        results = await asyncio.gather(*(box.python(code) for box in taken))
        return [[float(word) for word in result.stdout.split()] for result in results]

    spans = with_boxes(SandboxConfig(servers=2, concurrency=1), work)
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(spans))


@pytest.mark.full
def test_a_server_closed_while_it_starts_leaves_nothing(family: Family) -> None:
    """At 100 moments of the few milliseconds in which bubblewrap makes its namespaces."""

    async def left(polls: int) -> list[int]:
        server = Server(SandboxConfig())
        (await server.connect()).close()
        assert server.pid is not None
        started: list[int] = []
        for _ in range(polls):
            started = family(server.pid) or started
        server.close()
        return started

    assert all_end([pid for moment in range(100) for pid in asyncio.run(left(moment % 20 + 1))])


def test_a_closed_pool_refuses(family: Family) -> None:
    async def main() -> None:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        box = await boxes.take(SPEC)
        await box.python("1")
        await boxes.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.python("1")
        with pytest.raises(SandboxError, match="closed"):
            await boxes.take(SPEC)

    asyncio.run(main())
    assert family(os.getpid()) == []


def test_a_parent_killed_with_signal_9_leaves_nothing(family: Family) -> None:
    program = (
        "import asyncio\nfrom sparring.sandbox.bubblewrap import BubblewrapBoxes\n"
        "from sparring.sandbox.config import SandboxConfig\nfrom sparring.types import BoxSpec\n"
        "async def main():\n"
        "    boxes = BubblewrapBoxes(SandboxConfig(servers=1))\n"
        "    box = await boxes.take(BoxSpec(timeout_s=3600.0))\n"
        "    await box.python('import os\\nif os.fork() == 0: os.setsid()\\nwhile True: pass')\n"
        "asyncio.run(main())"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        tree = asyncio.run(asyncio.wait_for(running(family, parent.pid, 5), 60))
    finally:
        parent.kill()
        parent.wait()
    assert all_end(tree)


def test_boxes_have_one_image_and_no_network() -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        with refused_at("box.image", "'python'"):
            await boxes.take(BoxSpec(image="absent"))
        with refused_at("box.network", "false"):
            await boxes.take(BoxSpec(network=True))

    with_boxes(SandboxConfig(), work)


def test_a_tool_host_that_is_off_answers_with_errors(family: Family) -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        box = await boxes.take(SPEC)
        for result in (await box.python("print(1)"), await box.exec(["true"])):
            assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: the tool host is switched off\n")
        await box.write("f", b"x")
        with pytest.raises(FileNotFoundError):
            await box.read("f")
        await box.close()
        assert family(os.getpid()) == []

    with_boxes(SandboxConfig(enabled=False, bwrap="no-such-program"), work)


def test_a_disabled_sandbox_has_snapshots_and_verifiers_of_nothing() -> None:
    async def work(boxes: BubblewrapBoxes) -> None:
        box = await boxes.take(BoxSpec())
        kept = await box.snapshot()
        verifier = await box.verifier(["answer.txt"])
        assert (await (await box.fork(kept)).entries(), await verifier.entries()) == ({}, {})

    with_boxes(SandboxConfig(enabled=False, bwrap="no-such-program"), work)
