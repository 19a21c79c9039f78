"""What lives on in boxes of every root, in forks and in verifiers; and snapshots beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image import build

from sparring.errors import BadInput
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.images.image import UnpackedImage
from sparring.types import BoxSpec, TreeEntry

SPEC = BoxSpec(timeout_s=20.0, processes=32)
SERVER = "import socket\ns = socket.create_server(('127.0.0.1', 8000))\nprint('up', flush=True)\ns.accept()[0].sendall(b'hi')"


async def plain(box: Any) -> Any:
    return box


async def fork(box: Any) -> Any:
    return await box.fork(await box.snapshot())


async def verifier(box: Any) -> Any:
    await box.snapshot()
    return await box.verifier(["answer.txt"])


async def lives(box: Any, *, has_python: bool) -> None:
    """Use every word of the protocol that lives on or has a folder."""
    await box.upload(
        {"sub/file": b"data", "run": TreeEntry(kind="file", data=b"#!/bin/sh\necho ran\n", executable=True)}
    )
    assert (await box.download("sub"))["file"].data == b"data"
    told = await box.exec('pwd; ls; echo "$WORD"; ../run', cwd="sub", environment={"WORD": "a b"})
    assert told.stdout == "/box/sub\nfile\na b\nran\n", told
    shell = await box.shell(environment={"WORD": "b"})
    await shell.run("cd sub; other=c; sleep 1000 &")
    assert (await shell.run("pwd; echo $WORD $other; jobs | wc -l | tr -d ' ' 2>/dev/null")).stdout.startswith(
        "/box/sub\nb c\n"
    )
    await shell.close()
    process = await box.start(["cat"])
    await process.write("line\n", ends=True)
    assert (await process.wait()).stdout == "line\n"
    terminal = await box.terminal(["cat"], cwd="sub")
    await terminal.type("typed\r")
    assert await terminal.shows("typed\ntyped", 20.0)
    await terminal.close()
    if has_python:
        server = await box.start(["python3", "-c", SERVER])
        while "up" not in (told := await server.output()).stdout:
            assert told.end == "running", told
        with await box.connect(8000) as link:
            assert await asyncio.to_thread(link.recv, 2) == b"hi"
    else:
        with pytest.raises(ConnectionRefusedError):
            await box.connect(8000)


@pytest.mark.parametrize("make", [plain, fork, verifier])
@pytest.mark.parametrize("image", ["python", "host", "small"])
def test_everything_lives_on_in_every_root(image: str, make: Callable[[Any], Awaitable[Any]], tmp_path: Path) -> None:
    async def main() -> None:
        layers = build(tmp_path / "image") if image == "small" else ()
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), image_of=lambda name: UnpackedImage(layers))
        try:
            box = await boxes.take(replace(SPEC, image=image, user=0))
            await lives(await make(box), has_python=image != "small")
        finally:
            await boxes.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_snapshot_waits_for_a_command_that_runs(bench: Any) -> None:
    async def work(box: Any) -> bytes:
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def take(stream: str, piece: bytes) -> None:
            began.set()
            await goes_on.wait()

        text = "head -c 5000000 /dev/zero; echo done > file"  # more than may be on its way
        running = asyncio.create_task(box.exec(text, on_output=take))
        await began.wait()
        snapshot = asyncio.create_task(box.snapshot())
        for _ in range(10):
            await asyncio.sleep(0)  # it asks
        later = asyncio.create_task(box.exec("echo later > file"))
        goes_on.set()
        kept = await snapshot
        assert (await running).exit_code == (await later).exit_code == 0
        assert (await box.read("file"), kept.processes) == (b"later\n", ())
        return bytes(await (await box.fork(kept)).read("file"))

    assert bench.box(work, SPEC) == b"done\n"


@pytest.mark.parametrize("word", ["start", "shell", "terminal"])
def test_a_snapshot_beside_what_lives_on_is_refused_by_name_or_ends_it(bench: Any, word: str) -> None:
    async def work(box: Any) -> tuple[str, ...]:
        await box.write("file", b"one")
        if word == "shell":
            handle = await box.shell()
            await handle.run("sleep 1000 &")
        else:
            handle = await getattr(box, word)(["sleep", "1000"])
        while not any("sleep 1000" in line for line in await lines(box)):
            pass
        with pytest.raises(BadInput, match=r"no process lives on, got .*sleep 1000"):
            await box.snapshot()
        assert not handle.ended
        kept = await box.snapshot(ends=True)
        assert handle.ended
        await box.write("file", b"two")
        assert await (await box.fork(kept)).read("file") == b"one"
        assert (await (await box.shell()).run("cat file")).stdout == "two"
        return tuple(kept.processes)

    async def lines(box: Any) -> list[str]:
        told = await box.exec("for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file; echo; done 2>/dev/null")
        return str(told.stdout).splitlines()

    assert "sleep 1000" in bench.box(work, SPEC)


def test_a_process_that_has_ended_is_in_no_snapshot_s_way(bench: Any) -> None:
    async def work(box: Any) -> Any:
        process = await box.start("echo said")
        await process.wait()
        kept = await box.snapshot()
        return (await process.output()).stdout, kept.processes

    assert bench.box(work, SPEC) == ("said\n", ())


def test_a_fork_that_is_given_up_while_it_starts_leaves_its_layers(bench: Any) -> None:
    async def work(box: Any) -> list[bytes]:
        await box.write("file", b"one")
        kept = await box.snapshot()
        found = []
        for rounds in range(12):
            given_up = await box.fork(kept)
            running = asyncio.create_task(given_up.exec(["true"]))
            for _ in range(rounds):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if rounds % 2:
                await given_up.close()
            found.append(await (await box.fork(kept)).read("file"))
        return found

    assert bench.box(work, SPEC) == [b"one"] * 12
