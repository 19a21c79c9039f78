"""What the gateway costs: requests and streamed events a second, and what it adds to an answer, beside a server that
only reads and answers.

    python benchmarks/gateway.py

Both servers are uvicorn with starlette in a process of their own, asked through keep-alive sockets by this one. The bare
one parses a JSON body and writes an answer. The gateway answers from a scripted engine: each request holds a whole
conversation, which is parsed, matched, bridged, sampled and recorded in memory. Conversations have four turns and grow to
4 kB, or 24 turns and 64 kB for the latency: the difference of the quantiles at 200 requests a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import uvicorn
from common.figures import claim, read_options
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sparring.gateway.server import open_door
from sparring.generation import Sampling
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.stages.runtime.garbage import fewer_collections
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message

PATH = "/v1/chat/completions"
WORD = "You may call one or more functions to assist with the user query. "
EVENTS = 400
"""Of one streamed answer."""
ANSWER = "The answer is 46."
PLAYERS = 20
ROLLOUTS = 2000
"""Doors of the gateway; each conversation has one of its own, until there are more."""
RATE = 200
"""Requests a second at which latency is measured."""


def main() -> None:
    """Measure, print, claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--connections", type=int, default=8)
    options = read_options(parser, seconds=0.5, connections=2)
    figures = {}
    for name, serve in (("bare", bare), ("gateway", gateway)):
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=serve, args=(there,), daemon=True)
        process.start()
        url, keys = here.recv()
        figures[name] = asyncio.run(measured(url, keys, options.seconds, options.connections))
        print(name, {what: round(value, 3) for what, value in figures[name].items()}, flush=True)
        process.terminate()
        process.join()
    ours, beside = figures["gateway"], figures["bare"]
    claims = [
        claim("requests a second at 4 kB / bare server", ours["requests"] / beside["requests"], "", 0.3, ">="),
        claim("streamed events a second / bare server", ours["events"] / beside["events"], "", 0.5, ">="),
        claim("added latency at 200 requests/s, median", ours["median_ms"] - beside["median_ms"], "ms", 1.0, "<="),
        claim("added latency at 200 requests/s, p99", ours["p99_ms"] - beside["p99_ms"], "ms", 5.0, "<="),
    ]
    print(json.dumps({"claims": claims}))


async def measured(url: str, keys: list[str], seconds: float, connections: int) -> dict[str, float]:
    """Measure one server."""
    host, port = url.removeprefix("http://").split(":")
    port_number = int(port)

    async def opened() -> Client:
        return await Client.open(host, port_number, keys)

    requests = await asked_at_once(opened, lambda number: conversation(number, 4, 4096), seconds, connections)
    streamed = await asked_at_once(opened, lambda number: [streaming(number)], seconds, 2)
    taken = await asked_in_time(opened, lambda number: conversation(number, 24, 65536), seconds)
    return {
        "requests": requests,
        "events": streamed * EVENTS,
        "median_ms": statistics.median(taken) * 1e3,
        "p99_ms": statistics.quantiles(taken, n=100)[98] * 1e3,
    }


def conversation(number: int, turns: int, size: int) -> list[tuple[int, bytes]]:
    """The requests of one conversation, each of which continues the one before; the last has about so many bytes."""
    text = WORD * (size // turns // len(WORD))
    messages = [{"role": "user", "content": f"{number} {text}"}]
    bodies = []
    for _ in range(turns):
        body = json.dumps({"model": "policy", "messages": messages, "stream": False}).encode()
        bodies.append((number, body))
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": text}]
    return bodies


def streaming(number: int) -> tuple[int, bytes]:
    """A request for a long reply."""
    messages = [{"role": "user", "content": f"{number} {WORD}"}]
    body = {"model": "policy", "messages": messages, "stream": True, "max_tokens": EVENTS}
    return number, json.dumps(body).encode()


class Client:
    """A keep-alive connection that reads no more of an answer than where it ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: list[str]) -> None:
        self._reader, self._writer = reader, writer
        self._heads = [
            f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/json\r\ncontent-length: ".encode()
            for key in keys
        ]

    @classmethod
    async def open(cls, host: str, port: int, keys: list[str]) -> Client:
        """Open a connection."""
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        return cls(reader, writer, keys)

    async def ask(self, number: int, body: bytes) -> None:
        """Send a request of the conversation with this number, which is a rollout's, and read its answer."""
        self._writer.write(b"%b%d\r\n\r\n%b" % (self._heads[number % len(self._heads)], len(body), body))
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode())
        if b"content-length: " in head:
            await self._reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        else:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def asked_at_once(
    opened: Callable[[], Awaitable[Client]],
    bodies: Callable[[int], list[tuple[int, bytes]]],
    seconds: float,
    connections: int,
) -> float:
    """Return requests a second of so many connections, each with the next request behind an answer."""
    prepared = [[bodies(number * connections + of) for number in range(int(60 * seconds))] for of in range(connections)]
    started, count = time.perf_counter(), 0

    async def work(conversations: list[list[tuple[int, bytes]]]) -> None:
        nonlocal count
        client = await opened()
        for number, body in chain.from_iterable(conversations):
            if time.perf_counter() > started + seconds:
                break
            await client.ask(number, body)
            count += 1
        client.close()

    await asyncio.gather(*map(work, prepared))
    return count / (time.perf_counter() - started)


async def asked_in_time(
    opened: Callable[[], Awaitable[Client]], bodies: Callable[[int], list[tuple[int, bytes]]], seconds: float
) -> list[float]:
    """Return the seconds of each of `RATE` requests a second, from when it was due: of `PLAYERS` conversations."""
    taken: list[float] = []
    each = int(RATE * seconds) // PLAYERS
    prepared = [
        [body for number in range(each // 24 + 1) for body in bodies(10**6 + number * PLAYERS + player)][:each]
        for player in range(PLAYERS)
    ]
    begun = time.perf_counter()

    async def play(player: int) -> None:
        client = await opened()
        for place, (number, body) in enumerate(prepared[player]):
            due = begun + (place * PLAYERS + player) / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await client.ask(number, body)
            taken.append(time.perf_counter() - max(due, begun))
        client.close()

    await asyncio.gather(*map(play, range(PLAYERS)))
    return taken


def bare(pipe: Any) -> None:
    """Serve a starlette application that reads and answers."""
    event = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'

    async def endpoint(request: Request) -> Response:
        body = json.loads(await request.body())
        if not body["stream"]:
            answer = {"id": "x", "choices": [{"message": {"role": "assistant", "content": ANSWER}}]}
            return Response(json.dumps(answer), media_type="application/json")

        async def events() -> Any:
            for _ in range(EVENTS):
                yield event
                await asyncio.sleep(0)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def serve() -> None:
        application = Starlette(routes=[Route(PATH, endpoint, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(application, port=0, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        with fewer_collections():
            pipe.send((f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", ["none"]))
            await serving

    asyncio.run(serve())


class Yielding(ScriptedEngine):
    """A scripted engine that lets others run between two tokens, as a real one does, and keeps no prompts."""

    async def generate(self, request: Any) -> Any:
        """Return all of them at once."""
        *_, completion = [piece async for piece in super().stream(replace(request, conversation=None))]
        self.requests.clear()
        return completion

    async def stream(self, request: Any) -> Any:
        """Yield the script's tokens."""
        async for piece in super().stream(replace(request, conversation=None)):
            yield piece
            await asyncio.sleep(0)
        self.requests.clear()  # each has its whole prompt, which every garbage collection would walk


def gateway(pipe: Any) -> None:
    """Serve a door to a session on a scripted engine."""
    renderer = toy_renderer(2000)
    short = reply_tokens(renderer, Message(role="assistant", content=ANSWER))
    long = tuple(renderer.tokenizer.encode("a b " * EVENTS))[: EVENTS - 1]

    def script(request: Any) -> Any:
        return long if request.sampling.max_tokens == EVENTS else short

    async def serve() -> None:
        limits = Limits(max_turns=10**9, max_tokens=10**9, max_tool_calls=10**9)
        recorder = Recorder(Yielding(script), renderer, sampling=Sampling(max_tokens=1000), max_context=1 << 17)
        async with AsyncExitStack() as stack:
            sessions = (recorder.open(toy_task(), rollout_id=f"r{n}", seed=7, limits=limits) for n in range(ROLLOUTS))
            doors = [await stack.enter_async_context(open_door(session)) for session in sessions]
            with fewer_collections():  # as in a run
                pipe.send((doors[0].url, [door.key for door in doors]))
                await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
