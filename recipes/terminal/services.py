"""Tasks with services that must run, or must end. They are asked through their port, or by files that the world writes,
while they live; what they are asked is drawn when they are asked."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

from kind import NAMES, Data, kinds, text, words

from sparring.errors import SpoiltFile
from sparring.protocols import LiveProcess, Sandbox

PATIENCE_S = 6.0
"""Seconds within which a service has to answer all that it is asked."""

LATER_S = 0.5
"""Seconds before a service is asked once more, when it may think that it has answered all."""

FILTERS: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "sorted": ("sort", sorted),
    "in capitals": ("tr a-z A-Z", lambda lines: [line.upper() for line in lines]),
    "the last one first": ("tac", lambda lines: lines[::-1]),
}
"""What a program makes of the lines of a file: in words, a command, and a function."""

LOOK_S = 0.05
"""Seconds between two looks for what takes its time."""

MOST_ANSWER = 1 << 16

LISTEN = """cat > /tmp/serve.py <<'END'
import socketserver
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            line = line.decode().rstrip("\\n")
            self.wfile.write(({answer} + "\\n").encode())
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("127.0.0.1", {port}), Answer).serve_forever()
END"""
RUN = "python3 /tmp/serve.py > /dev/null 2>&1 &"

ANSWERS: dict[str, tuple[str, Callable[[str], str]]] = {
    "in capitals": ("line.upper()", str.upper),
    "backwards": ("line[::-1]", lambda line: line[::-1]),
    "with its words in alphabetical order": (
        "' '.join(sorted(line.split()))", lambda line: " ".join(sorted(line.split())),
    ),
}  # fmt: skip
"""What a server of lines makes of a line: in words, in Python, and as a function."""

WATCH = """cat > /tmp/watch <<'END'
while :; do
  for file in {source}/*; do
    [ -f "$file" ] && {what} < "$file" > /tmp/out && mv /tmp/out {target}/"${{file##*/}}" && rm "$file"
  done
  sleep 0.05
done
END"""


def in_time(ask: Callable[[Sandbox, Data, Any], Awaitable[bool]]) -> Callable[[Sandbox, Data, Any], Awaitable[bool]]:
    """Return the question with an end: a service that is late, or breaks a connection, is none."""

    async def asked(box: Sandbox, data: Data, kept: Any) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await ask(box, data, kept)
        except (SpoiltFile, TimeoutError, ValueError):  # broken off, late, or an answer without end
            return False

    return asked


async def rounds(data: Data) -> AsyncIterator[int]:
    """Count the times that a service is asked, each by another client: as often as was drawn, and once more later."""
    for at in range(data["rounds"]):
        yield at
    await asyncio.sleep(LATER_S)
    yield data["rounds"]


@contextlib.asynccontextmanager
async def connected(box: Sandbox, port: int) -> Any:
    """Connect to a port of the box, once something listens there."""
    while True:
        try:
            socket = await box.connect(port)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(LOOK_S)
    reader, writer = await asyncio.open_connection(sock=socket, limit=MOST_ANSWER)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@in_time
async def by_pages(box: Sandbox, data: Data, kept: Any) -> bool:
    """Change one of two files of the folder, and read over HTTP the other, which has not changed, a file that is not
    there, and it."""
    async for at in rounds(data):
        name, other = data["pages"][at % 2], data["pages"][at % 2 - 1]
        said = secrets.token_hex(8)
        await box.write(f"{data['folder']}/{name}", said.encode())
        wanted = {other: data["before"][f"{data['folder']}/{other}"], secrets.token_hex(4): None, name: said}
        for page, content in wanted.items():
            if await page_of(box, data["port"], page) != (None if content is None else content.encode()):
                return False
        await box.write(f"{data['folder']}/{name}", data["before"][f"{data['folder']}/{name}"].encode())
    return True


async def page_of(box: Sandbox, port: int, name: str) -> bytes | None:
    """Return what a server of HTTP has at a path; None if it says that nothing is there.

    Raises:
        ValueError: the answer is too long.
    """
    async with connected(box, port) as (reader, writer):
        writer.write(f"GET /{name} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
        answer = await reader.read(MOST_ANSWER)
        while piece := await reader.read(MOST_ANSWER):
            answer += piece
            if len(answer) > MOST_ANSWER:
                raise ValueError("an answer without end")
    head, _, body = answer.partition(b"\r\n\r\n")
    return body if b" 200" in head.partition(b"\r\n")[0] else None


@in_time
async def by_lines(box: Sandbox, data: Data, kept: Any) -> bool:
    """Ask a server of lines: each client one to six lines of one to six words, some of them at once or in two parts."""
    right = ANSWERS[data["answer"]][1]
    async for _ in rounds(data):
        async with connected(box, data["port"]) as (reader, writer):
            lines = [" ".join(secrets.token_hex(3) for _ in range(drawn(1, 6))) for _ in range(drawn(1, 6))]
            asked = "".join(f"{line}\n" for line in lines).encode()
            cut = drawn(1, len(asked))
            writer.write(asked[:cut])
            for at, line in enumerate(lines):
                if asked[:cut].count(b"\n") <= at and asked[cut:]:
                    writer.write(asked[cut:])
                    asked = asked[:cut]
                if await reader.readline() != f"{right(line)}\n".encode():
                    return False
    return True


@in_time
async def by_files(box: Sandbox, data: Data, kept: Any) -> bool:
    """Lay files into one folder, and wait for what appears in the other."""
    made = FILTERS[data["filter"]][1]
    async for at in rounds(data):
        name = data["names"][at]
        lines = [secrets.token_hex(4) for _ in range(drawn(2, 9))]
        await box.write(f"{data['source']}/{name}", text(lines).encode())
        while name not in await box.entries(data["target"]) or name in await box.entries(data["source"]):
            await asyncio.sleep(LOOK_S)
        if await box.read(f"{data['target']}/{name}", 1000) != text(made(lines)).encode():
            return False
        await box.write(f"{data['target']}/{name}", b"")  # what is in it is known now, and after the end is `after`
    return True


def drawn(least: int, most: int) -> int:
    """Return a number that no program can foresee."""
    return least + secrets.randbelow(most + 1 - least)


async def both(box: Sandbox, data: Data) -> list[LiveProcess]:
    """Run the world's two programs: the one to end, and the one to keep."""
    return [await box.start(["sh", name]) for name in data["running"]]


@in_time
async def by_processes(box: Sandbox, data: Data, kept: Any) -> bool:
    """Look whether one program has ended and the other still repeats what it is told."""
    ends, stays = kept
    await ends.wait(PATIENCE_S / 2)
    said = secrets.token_hex(8)
    await stays.write(f"{said}\n")
    while not stays.ended and said not in (await stays.output()).stdout:
        await asyncio.sleep(LOOK_S)
    return bool(ends.ended and not stays.ended)


def web(random: Random) -> dict[str, Any]:
    """A folder over HTTP."""
    folder, other, a, b = random.sample(NAMES, 4)
    port = random.randint(8000, 9000)
    before = {f"{folder}/{name}": text(words(random, 1, 3)) for name in (a, b)} | {
        f"{other}/{a}": text(words(random, 1, 3))
    }
    serves = f"python3 -m http.server {port} --bind 127.0.0.1"
    return {
        "prompt": f"Serve the files of the folder {folder} over HTTP, as they are at the time, at port {port} of 127.0.0.1: "
        f"/{a} is the file {a}. Leave the server running.",
        "before": before, "after": before, "folder": folder, "pages": [a, b], "port": port,
        "rounds": random.randint(4, 12),
        "commands": [f"{serves} -d {folder} > /dev/null 2>&1 &"],
        "near": [[f"{serves} -d {other} > /dev/null 2>&1 &"], [f"{serves} > /dev/null 2>&1 &"],
                 [f"cp -r {folder} /tmp/old; {serves} -d /tmp/old > /dev/null 2>&1 &"],
                 [f"timeout 0.2 {serves} -d {folder} > /dev/null 2>&1"]],
    }  # fmt: skip


def answers(random: Random) -> dict[str, Any]:
    """A server of lines."""
    port, answer = random.randint(8000, 9000), random.choice(list(ANSWERS))
    other = random.choice([name for name in ANSWERS if name != answer])
    return {
        "prompt": f"Run a server at port {port} of 127.0.0.1 that answers each line of each client with the line {answer}, "
        "until the client closes. Leave it running, and its program in /tmp.",
        "before": {}, "after": {}, "port": port, "answer": answer, "rounds": random.randint(4, 12),
        "commands": [LISTEN.format(answer=ANSWERS[answer][0], port=port), RUN],
        "near": [[LISTEN.format(answer=ANSWERS[answer][0], port=port)],
                 [LISTEN.format(answer=ANSWERS[other][0], port=port), RUN],
                 [LISTEN.format(answer=ANSWERS[answer][0], port=port + 1), RUN]],
    }  # fmt: skip


def spool(random: Random) -> dict[str, Any]:
    """A program in the background that works on files as they come."""
    source, target, *names = random.sample(NAMES, 8)
    told, other = random.sample(list(FILTERS), 2)
    del names[random.randint(4, 6) :]

    def watch(source: str, target: str, what: str) -> str:
        return WATCH.format(source=source, target=target, what=what)

    what, run = FILTERS[told][0], "sh /tmp/watch > /dev/null 2>&1 &"
    return {
        "prompt": f"Run a program in the background that waits for files in the folder {source}. It writes the lines of each, "
        f"{told}, to a file of the same name in {target}, and then deletes the one in {source}. Names of files begin with a "
        "letter. Leave it running, and its program in /tmp.",
        "before": {source: None, target: None}, "after": {source: None, **{f"{target}/{name}": "" for name in names}},
        "source": source, "target": target, "names": names, "filter": told, "rounds": len(names) - 1,
        "commands": [watch(source, target, what), run],
        "near": [[watch(source, target, what)], [watch(source, target, FILTERS[other][0]), run],
                 [watch(target, source, what), run]],
    }  # fmt: skip


def stop(random: Random) -> dict[str, Any]:
    """One of two programs is ended."""
    ends, stays = random.sample(NAMES, 2)
    programs = {name: f"while read line; do echo {random.randint(10, 99)} $line; done\n" for name in (ends, stays)}
    return {
        "prompt": f"Two programs run, sh {ends} and sh {stays}. End sh {ends}, and leave sh {stays} running.",
        "before": programs, "after": programs, "running": [ends, stays],
        "commands": [f"pkill -xf 'sh {ends}'"],
        "near": [[f"pkill -xf 'sh {stays}'"], [f"pkill -xf 'sh {ends}'; pkill -xf 'sh {stays}'"], [f"pkill -STOP -xf 'sh {ends}'"]],
    }  # fmt: skip


KINDS = [
    *kinds("services", web, programs=("python3",), alive=by_pages),
    *kinds("services", answers, programs=("python3",), alive=by_lines),
    *kinds("services", spool, alive=by_files),
    *kinds("services", stop, programs=("pkill",), serve=both, alive=by_processes),
]
