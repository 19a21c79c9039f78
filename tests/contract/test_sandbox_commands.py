"""The contract of what lives on in a `Sandbox`, and of several commands at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from refusals import refused_at
from sandboxes import Bench, in_box

from sparring.errors import BadInput, PolicyFailure, SpoiltFile
from sparring.protocols import Sandbox, Terminal
from sparring.types import BoxSpec, TreeEntry

MB = 1 << 20
SERVER = (
    "import socket\ns = socket.create_server(('127.0.0.1', {port}))\nprint('up', flush=True)\n"
    "while True:\n    c, _ = s.accept()\n    c.sendall(c.recv(100).upper())\n    c.close()"
)


async def said(process: Any, text: str) -> str:
    """The output of a process, once it has said a text."""
    while text not in (told := await process.output()).stdout:
        assert told.end == "running", told
    return str(told.stdout)


def test_exec_takes_a_text_bytes_a_folder_and_variables(bench: Bench) -> None:
    async def work(box: Sandbox) -> Any:
        await box.write("sub/f", b"")
        command = 'pwd; ls; echo "$WORD"; wc -c; exit 5'
        return await box.exec(command, stdin=b"\xff\0" * 500_000, cwd="sub", environment={"WORD": "a b"})

    result = in_box(bench, work)
    assert (result.stdout, result.exit_code, result.end) == ("/box/sub\nf\na b\n1000000\n", 5, "exited")


@pytest.mark.parametrize(
    ("line", "end", "code"),
    [
        ("true", "exited", 0),
        ("exit 137", "exited", 137),
        ("kill -9 $$", "signalled", 137),
        ("sleep 3600", "timed out", 137),
        ("for f in a b; do head -c 3000000 /dev/zero > $f; done", "out of disk", 1),
    ],
)
def test_how_a_command_ended_is_one_word(bench: Bench, line: str, end: str, code: int) -> None:
    async def work(box: Sandbox) -> Any:
        return await box.exec(f"echo so far; {line}", timeout_s=1.0 if end == "timed out" else None)

    result = in_box(bench, work, BoxSpec(timeout_s=20.0, disk_bytes=4 * MB))
    assert (result.stdout, result.end, result.exit_code) == ("so far\n", end, code)


def test_a_folder_that_is_gone_is_told(bench: Bench) -> None:
    async def work(box: Sandbox) -> None:
        for begin in (box.exec, box.start, box.terminal):
            with pytest.raises(FileNotFoundError):
                await begin(["true"], cwd="/gone")
        with pytest.raises(FileNotFoundError):
            await box.shell(cwd="/gone")
        await box.exec("touch file")
        with pytest.raises(SpoiltFile):
            await box.exec(["true"], cwd="file")
        assert (await box.exec("pwd")).stdout == "/box\n"

    in_box(bench, work)


def test_commands_run_at_once_and_end_apart(bench: Bench) -> None:
    """Each ends with all that it started, in sessions of its own too, and with nothing of another."""

    async def work(box: Sandbox) -> None:
        waits = "mkfifo $0; (setsid sh -c 'echo $$ > kept.$0; exec sleep 3600' $0 > /dev/null 2>&1 &) ; read x < $0"
        one, two = (asyncio.create_task(box.exec(["sh", "-c", waits, name])) for name in ("one", "two"))
        script = "for f in one two; do until [ -s kept.$f ]; do :; done; done; echo > one; cat kept.one kept.two"
        pids = (await box.exec(script)).stdout.split()
        assert (await one).exit_code == 0
        alive = await box.exec(["sh", "-c", 'for pid; do kill -0 "$pid" 2> /dev/null && echo "$pid"; done', "", *pids])
        assert alive.stdout.split() == pids[1:]
        await box.exec("echo > two")
        assert (await two).exit_code == 0
        assert (await box.exec(["kill", "-0", pids[1]])).exit_code == 1

    in_box(bench, work)


def test_output_is_handed_on_at_the_taker_s_pace(bench: Bench) -> None:
    """A command waits for a slow taker; nothing is lost, and nothing grows."""
    taken: list[int] = []

    async def work(box: Sandbox) -> Any:
        held = asyncio.Event()

        async def slow(stream: str, piece: bytes) -> None:
            taken.append(len(piece))
            await held.wait()

        count = "import os\nn = 0\nfor _ in range(160):\n    n += os.write(1, bytes(1 << 16))\n    print(n, file=open('n', 'w'))"
        running = asyncio.create_task(box.exec(["python3", "-c", count], on_output=slow))
        far = b""
        for _ in range(40):  # it comes to a stop, which more looks do not change
            far = (await box.exec("cat n 2> /dev/null")).stdout.encode()
        assert far and int(far) < 4 * MB
        held.set()
        return await running

    result = in_box(bench, work)
    assert (result.exit_code, sum(taken), result.missing_bytes) == (0, 10 * MB, 10 * MB - 4096)


def test_a_taker_that_fails_ends_its_command(bench: Bench) -> None:
    async def work(box: Sandbox) -> str:
        async def fails(stream: str, piece: bytes) -> None:
            raise KeyError(stream)

        with pytest.raises(KeyError, match="stderr"):
            await box.exec("echo x >&2; exec sleep 3600", on_output=fails, timeout_s=3600.0)
        return (await box.exec("ls /proc | grep -c '^[0-9]'")).stdout

    assert int(in_box(bench, work)) <= 5


def test_a_process_runs_beside_others(bench: Bench) -> None:
    async def work(box: Sandbox) -> None:
        process = await box.start("echo ready; cat; echo done >&2; exit 3")
        await said(process, "ready")
        await process.write(b"typed\n")
        await said(process, "typed")
        assert (await process.wait(0.0)).end == "running" and not process.ended
        await process.write("x" * 300_000, ends=True)
        result = await process.wait()
        assert (result.exit_code, result.stderr, result.end) == (3, "done\n", "exited")
        assert result.stdout.startswith("ready\ntyped\nxx") and result.missing_bytes > 200_000
        assert process.ended and await process.output() == result == await process.kill()

    in_box(bench, work)


def test_a_process_ends_with_all_that_it_left(bench: Bench) -> None:
    async def work(box: Sandbox) -> None:
        process = await box.start("(setsid sleep 3600 > /dev/null &) ; echo $(ls /proc | grep -c '^[0-9]')")
        assert (await process.wait()).end == "exited"
        left = "grep -l sleep /proc/[0-9]*/comm"
        assert len((await box.exec(left)).stdout.split()) == 1
        await process.close()
        assert (await box.exec(left)).stdout == ""
        endless = await box.start(["sleep", "3600"], timeout_s=0.1)
        assert ((await endless.wait()).end, (await endless.wait()).exit_code) == ("timed out", 137)

    in_box(bench, work)


def test_a_shell_lives_on(bench: Bench) -> None:
    async def work(box: Sandbox) -> None:
        shell = await box.shell(environment={"GIVEN": "yes"})
        await shell.run("mkdir -p a; cd a; x='it'\"'\"'s'; f() { echo \"$x: $1\"; }; sleep 3600 & export Y=1; false")
        result = await shell.run('echo $?; pwd; f "$GIVEN"; jobs; echo err >&2; (exit 4)')
        assert result.stdout.startswith("1\n/box/a\nit's: yes\n") and "sleep 3600" in result.stdout
        assert (result.stderr, result.exit_code, result.end) == ("err\n", 4, "exited")
        assert (await shell.run("cat; echo 'quote")).exit_code == 2
        assert (await shell.run("cat <<E\n$Y\nE\ncat")).stdout == "1\n"
        assert (await shell.run("a\0b")).exit_code == 126
        assert len((await shell.run("seq 100000", output_bytes=100)).stdout) < 140
        await shell.close()
        with pytest.raises(PolicyFailure):
            await shell.run("true")
        assert (await box.exec("grep -l sleep /proc/[0-9]*/comm")).stdout == ""

    in_box(bench, work)


@pytest.mark.parametrize(
    "text",
    [
        "sleep 3600",
        "while :; do :; done",
        "while :; do sleep 0.01; done",
        "sleep 3600 | cat",
        "trap '' INT; sleep 3600",
    ],
)
def test_a_shell_outlives_a_text_that_is_out_of_time(bench: Bench, text: str) -> None:
    async def work(box: Sandbox) -> None:
        shell = await box.shell()
        await shell.run("x=5; cd /tmp; sleep 3000 &")
        result = await shell.run(f"echo so far; {text}", timeout_s=0.2)
        assert (result.stdout, result.end, result.exit_code, shell.ended) == ("so far\n", "timed out", 137, False)
        after = await shell.run("echo $x; pwd; jobs")
        assert after.stdout.startswith("5\n/tmp\n") and "sleep 3000" in after.stdout

    in_box(bench, work)


def test_a_shell_that_does_not_let_go_has_ended(bench: Bench) -> None:
    async def work(box: Sandbox) -> None:
        shell = await box.shell()
        result = await shell.run("trap '' INT; echo so far; while :; do :; done", timeout_s=0.2)
        assert (result.stdout, result.end, shell.ended) == ("so far\n", "timed out", True)
        with pytest.raises(PolicyFailure, match="ended"):
            await shell.run("true")
        other = await box.shell()
        left = await other.run("exit 3")
        assert (left.exit_code, left.end, other.ended) == (3, "exited", True)

    in_box(bench, work)


def test_a_terminal_shows_its_screen(bench: Bench) -> None:
    async def shown(terminal: Terminal, text: str) -> None:
        assert await terminal.shows(text, 20.0), terminal.screen()

    async def work(box: Sandbox) -> None:
        terminal = await box.terminal(["sh"], columns=30, rows=5, environment={"PS1": "> "})
        await shown(terminal, ">")
        await terminal.type("stty size; printf '\\033[2J\\033[2;3Hat'; read x\r")
        await shown(terminal, "\n  at")
        assert terminal.screen().split("\n")[0] == ""
        await terminal.resize(40, 10)
        await terminal.type("\rstty size\r")
        await shown(terminal, "10 40")
        # one process that says it and sleeps: a shell between the two would not die of the interrupt
        await terminal.type("sh -c 'echo go$((1)); exec sleep 3600'\r")
        await shown(terminal, "go1")
        await terminal.type("\x03")
        await shown(terminal, "^C")
        await terminal.type("echo in$((1))terrupted\r")
        await shown(terminal, "in1terrupted")
        await terminal.type("exit 4\r")
        ended = await terminal.wait()
        assert ended is not None and ended.exit_code == 4 and terminal.ended

    in_box(bench, work)


@pytest.mark.parametrize(("columns", "rows"), [(0, 24), (80, 0), (-1, 24), (80, 100_000)])
def test_a_terminal_has_a_size(bench: Bench, columns: int, rows: int) -> None:
    async def work(box: Sandbox) -> None:
        with refused_at("terminal.rows" if columns == 80 else "terminal.columns", "1 to 1000"):
            await box.terminal(["sh"], columns=columns, rows=rows)

    in_box(bench, work)


def test_a_port_of_the_box_is_reached(bench: Bench) -> None:
    async def work(box: Sandbox) -> bytes:
        server = await box.start(["python3", "-c", SERVER.format(port=8080)])
        await said(server, "up")
        taken = await box.exec(["python3", "-c", SERVER.format(port=8080)])
        assert taken.exit_code == 1 and "Address already in use" in taken.stderr
        links = [await box.connect(8080) for _ in range(3)]
        reader, writer = await asyncio.open_connection(sock=links.pop())
        for link in links:
            link.close()
        writer.write(b"hello")
        answer = await reader.read()
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await box.connect(8081)
        with pytest.raises(BadInput):
            await box.connect(0)
        await server.close()
        with pytest.raises(ConnectionRefusedError):
            await box.connect(8080)
        with socket.socket() as outside:
            assert outside.connect_ex(("127.0.0.1", 8080)) != 0
        return answer

    assert in_box(bench, work) == b"HELLO"


def test_a_tree_goes_in_and_comes_out(bench: Bench) -> None:
    tree = {
        "a/b/data": bytes(range(256)),
        "a/run": TreeEntry(data=b"#!/bin/sh\necho ran\n", executable=True),
        "empty": TreeEntry(kind="folder"),
        "link": TreeEntry(kind="link", target="a/run"),
        "ž\n": b"",
    }

    async def work(box: Sandbox) -> Any:
        await box.upload(tree, "tree")
        assert (await box.exec("tree/link")).stdout == "ran\n"
        await box.exec("mkfifo tree/pipe")
        down = await box.download("tree")
        for path in ("../x", "/x", ""):
            with refused_at("upload", "paths within"):
                await box.upload({path: b""}, "tree")
        with pytest.raises(SpoiltFile, match="more than"):
            await box.download("tree", 300)
        with pytest.raises(FileNotFoundError):
            await box.download("none")
        return down

    folders = {name: TreeEntry(kind="folder", executable=True) for name in ("a", "a/b", "empty")}
    files = {name: TreeEntry(data=given) for name, given in tree.items() if isinstance(given, bytes)}
    link = TreeEntry(kind="link", target="a/run", executable=True)
    pipe = TreeEntry(kind="other")
    assert in_box(bench, work) == folders | files | {"a/run": tree["a/run"], "link": link, "pipe": pipe}
