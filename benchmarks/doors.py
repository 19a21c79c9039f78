"""What one hostile or long request costs the rollouts beside it: the longest pause of the run's event loop, its processor
time and its memory.

    python benchmarks/doors.py

The gateway and a scripted engine are in a process of their own, with a context of 32,768 ids. A task there looks at the
clock every millisecond; the largest gap while a request is answered is its pause. Requests come from this process, over
loopback sockets, one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from common.figures import claim, read_options, resident_bytes

from sparring.gateway.server import open_door
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, ToolCall, ToolSpec

CONTEXT = 32768
CHAT, MESSAGES, COUNT, MCP = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/mcp"
WORD = "You may call one or more functions to assist with the user query. "
REFUSED_MS, HONEST_MS_PER_ID = 50.0, 50.0 / 4000
"""Promises."""


class Adding:
    """A world's tools."""

    tools = (ToolSpec(name="add", description="Add.", parameters={"type": "object", "properties": {}}),)

    async def call(self, call: ToolCall) -> str:
        return "3"


def main() -> None:
    """Measure, print, claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names that hold this text")
    options = read_options(parser, only="2,000 characters")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(there,), daemon=True)
    process.start()
    port, key = here.recv()
    rows = []
    for name, honest, shape in SHAPES:
        if options.only not in name:
            continue
        data = shape(key)
        here.send("begin")
        here.recv()
        status = sent(port, data)
        here.send("end")
        pause_ms, cpu_s, grown_mb, ids = here.recv()
        rows.append((name, honest, status, pause_ms, cpu_s, grown_mb, ids))
        print(
            f"{name:44} {status:>4} pause {pause_ms:8.1f} ms  cpu {cpu_s:6.2f} s  memory {grown_mb:+7.1f} MB  {ids} ids",
            flush=True,
        )
    process.terminate()
    refused = max((row[3] for row in rows if not row[1]), default=0.0)
    told = max((row[3] / max(row[6], 4000) for row in rows if row[1]), default=0.0)
    claims = [
        claim("longest pause by a refused request", refused, "ms", REFUSED_MS),
        claim("longest pause by an honest request, for 4,000 ids", told * 4000, "ms", HONEST_MS_PER_ID * 4000),
        claim("memory held behind all of them", sum(row[5] for row in rows), "MB", 200.0),
    ]
    print(json.dumps({"claims": claims}))


def serve(pipe: Any) -> None:
    """Answer in this process, and say what each request cost."""

    async def serving() -> None:
        renderer, tokens = toy_renderer(), []

        def script(request: Any) -> Any:
            tokens.append(len(request.tokens))
            return reply_tokens(renderer, Message(role="assistant", content="Done."))

        limits = Limits(max_turns=10**6, max_tokens=10**9, max_tool_calls=10**6)
        recorder = Recorder(ScriptedEngine(script), renderer, max_context=CONTEXT)
        async with open_door(recorder.open(toy_task(), rollout_id="rl/0/0", seed=1, limits=limits)) as door:
            door.tools = Adding()
            pipe.send((int(door.url.rpartition(":")[2]), door.key))
            loop, watch = asyncio.get_running_loop(), Watch()
            watching = asyncio.create_task(watch.run())
            while await loop.run_in_executor(None, pipe.recv) == "begin":
                gc.collect()
                gc.freeze()
                await asyncio.sleep(0.02)  # the collection is a pause of ours
                tokens.clear()
                watch.worst_s, cpu, memory = 0.0, time.process_time(), resident_bytes()
                pipe.send("begun")
                await loop.run_in_executor(None, pipe.recv)
                await asyncio.sleep(0.02)
                pause = watch.worst_s * 1000
                pipe.send((pause, time.process_time() - cpu, (resident_bytes() - memory) / 1e6, max(tokens, default=0)))
            watching.cancel()

    asyncio.run(serving())


class Watch:
    """Watch over the event loop: the longest time between two looks at the clock that are a millisecond apart."""

    worst_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            self.worst_s, last = max(self.worst_s, now - last - 0.001), now


def sent(port: int, data: bytes) -> str:
    """Send bytes to the server and return the status of the answer; empty where there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        try:
            client.sendall(data)
        except OSError:
            pass
        try:
            answer = http.client.HTTPResponse(client)
            answer.begin()
            answer.read()
            return str(answer.status)
        except (OSError, http.client.HTTPException):
            return "cut"


def posted(path: str, body: bytes, key: str) -> bytes:
    """Return a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {key}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chat(messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": messages, "max_tokens": 5, **more}


def text(characters: int) -> str:
    return (WORD * (characters // len(WORD) + 1))[:characters]


def of_user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        *of_user("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0_0", "content": "3"},
    ]


def many(number: int) -> str:
    return json.dumps({f"k{n:05}": n for n in range(number)})


def tools(number: int, properties: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"property_{n}": {"type": "string"} for n in range(properties)}}
    named = [{"name": f"tool_{n}", "description": "Add.", "parameters": schema} for n in range(number)]
    return [{"type": "function", "function": tool} for tool in named]


def turns(number: int) -> list[dict[str, Any]]:
    one = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    return [*one * number, *of_user("z")]


def mcp(arguments: str) -> bytes:
    head = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": '
    return head + arguments.encode() + b"}}"


def request(path: str, body: Any) -> Callable[[str], bytes]:
    """Return what makes a request under a key; a body is made when it is needed."""
    return lambda key: posted(path, (made if isinstance(made := body(), bytes) else json.dumps(made).encode()), key)


SHAPES: list[tuple[str, bool, Callable[[str], bytes]]] = [
    ("honest: 2,000 characters", True, request(CHAT, lambda: chat(of_user(text(2000))))),
    ("honest: 100,000 characters", True, request(CHAT, lambda: chat(of_user(text(100_000))))),
    ("honest: 24 tools of 5 properties", True, request(CHAT, lambda: chat(of_user("Hi"), tools=tools(24, 5)))),
    ("honest: 400 turns", True, request(CHAT, lambda: chat(turns(400)))),
    ("honest: a call with 1,000 arguments", True, request(CHAT, lambda: chat(calling(many(1000))))),
    ("honest: count_tokens of 100,000 characters", True, request(COUNT, lambda: chat(of_user(text(100_000))))),
    ("a call with 300,000 arguments", False, request(CHAT, lambda: chat(calling(many(300_000))))),
    ("a call with 30,000 arguments", False, request(CHAT, lambda: chat(calling(many(30_000))))),
    ("a call with 15,000 arguments", False, request(CHAT, lambda: chat(calling(many(15_000))))),
    ("10 MB of text", False, request(CHAT, lambda: chat(of_user(text(10_000_000))))),
    ("3 MB of text", False, request(CHAT, lambda: chat(of_user(text(3_000_000))))),
    ("500,000 characters of text", False, request(CHAT, lambda: chat(of_user(text(500_000))))),
    ("3 MB of one letter", False, request(CHAT, lambda: chat(of_user("a" * 3_000_000)))),
    ("count_tokens: 10 MB of text", False, request(COUNT, lambda: chat(of_user(text(10_000_000))))),
    ("count_tokens: 3 MB of text", False, request(COUNT, lambda: chat(of_user(text(3_000_000))))),
    (
        "messages: 7 million []",
        False,
        request(CHAT, lambda: b'{"model":"policy","messages":[' + b"[]," * 6_999_999 + b"[]]}"),
    ),
    (
        "messages: 200,000 {}",
        False,
        request(CHAT, lambda: b'{"model":"policy","messages":[' + b"{}," * 199_999 + b"{}]}"),
    ),
    (
        "metadata: 7 million []",
        False,
        request(
            CHAT,
            lambda: json.dumps(chat(of_user("Hi"))).encode()[:-1] + b',"metadata":[' + b"[]," * 6_999_999 + b"[]]}",
        ),
    ),
    (
        "metadata: 100,000 []",
        False,
        request(CHAT, lambda: json.dumps(chat(of_user("Hi"), metadata=[[]] * 100_000)).encode()),
    ),
    ("500 tools of 100 properties", False, request(CHAT, lambda: chat(of_user("Hi"), tools=tools(500, 100)))),
    ("100 tools of 100 properties", False, request(CHAT, lambda: chat(of_user("Hi"), tools=tools(100, 100)))),
    ("10,000 turns", False, request(CHAT, lambda: chat(turns(10_000)))),
    ("2,000 turns and a wrong field", False, request(CHAT, lambda: chat(turns(2000), wrong=1))),
    (
        "nested 1,000,000 deep",
        False,
        request(CHAT, lambda: b'{"messages":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
    ),
    (
        "half of a surrogate pair behind 3 MB",
        False,
        request(CHAT, lambda: b'{"messages":"' + b"x" * 3_000_000 + b'\\ud800"}'),
    ),
    (
        "half of a surrogate pair in 60,000 values",
        False,
        request(CHAT, lambda: b'{"metadata":[' + b'"x",' * 60_000 + b'"\\ud800"]}'),
    ),
    ("an integer of 3 MB", False, request(CHAT, lambda: b'{"messages":' + b"9" * 3_000_000 + b"}")),
    ("/mcp: 18 MB of arguments", False, request(MCP, lambda: mcp('{"a": [' + "[]," * 5_999_999 + "[]]}"))),
    ("/mcp: 3 MB of arguments", False, request(MCP, lambda: mcp('{"a": [' + "[]," * 999_999 + "[]]}"))),
    ("/mcp: 60,000 arguments", False, request(MCP, lambda: mcp(many(60_000)))),
    ("/mcp: 60 MB under a wrong key", False, lambda key: posted(MCP, b"x" * 60_000_000, "sk-wrong")),
    (
        "a head of 60 MB of small headers",
        False,
        lambda key: b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 10_000_000 + b"\r\n",
    ),
    ("one header of 60 MB", False, lambda key: b"GET /health HTTP/1.1\r\nx: " + b"y" * 60_000_000 + b"\r\n\r\n"),
    ("an address of 60 MB", False, lambda key: b"GET /" + b"y" * 60_000_000 + b" HTTP/1.1\r\n\r\n"),
    (
        "chunks of one byte, 3 MB",
        False,
        lambda key: (
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nx-api-key: "
            + key.encode()
            + b"\r\n\r\n"
            + b"1\r\nx\r\n" * 3_000_000
        ),
    ),
    (
        "a chunk's extension of 30 MB",
        False,
        lambda key: (
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nx-api-key: "
            + key.encode()
            + b"\r\n\r\n1;"
            + b"x" * 30_000_000
        ),
    ),
    (
        "trailers of 60 MB",
        False,
        lambda key: (
            b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
            + b"x: y\r\n" * 10_000_000
            + b"\r\n"
        ),
    ),
    ("20,000 requests ahead of their answers", False, lambda key: b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000),
]

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
