"""What many engines cost a run.

    python benchmarks/scale.py [client] [turn] [push] [fleet] [ray]

All figures are processor seconds, medians of measurements that take turns.

`client`: a turn through `RemoteClient`, in the client's process and in the server's. The server is `TokenServer` on
uvicorn in a process of its own; its engine answers at once. Beside it, in turns: a plain asyncio connection that sends
the same prepared bytes and reads the answer without looking at it; the turn as a stream of `PIECES` pieces; and that
stream through a `Fleet`.

`turn`: all that a turn costs the controller: scheduler, chat harness, recorder and SQLite store on that client and that
server, conversations of `TURNS` turns of 500 new tokens, 2,000 tokens of context on average. Beside it the same on an
engine in the process, without the client.

`push`: from the trainer's copy of the weights to the last acknowledgement of two `sparring serve` on this machine,
added up over the three processes, as a multiple of a copy of the weights in memory.

`fleet`: two `sparring serve` of one thread with 64 requests each against one with 64, model A of benchmarks/engine.py.

`ray`: a step of a run whose two engines Ray places, on one node on this machine, against `local` at the same time:
controller and engines, and beside them Ray's own processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from common.figures import Claims, claim, read_options
from many.servers import fleet, push
from many.under_ray import ray
from many.whole_turn import played

from sparring.engine import wire
from sparring.engine.adapters.client import completion_of
from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.engine.fleet import Fleet
from sparring.engine.metrics import Latencies
from sparring.engine.server import Serving, TokenServer
from sparring.generation import Completion, Delta, GenerateRequest, Runs, Sampling

VOCABULARY = 150_000
NEW = 500
"""Tokens of a reply."""
LATER = 100
"""Tokens of a prompt behind the last reply."""
AT_ONCE = 32
"""Turns in flight, and turns of a measurement."""
PIECES = 10
"""Pieces of a streamed reply."""
TARGET_MS, ADDED_MS = 0.4, 0.1
"""Of the client, at 2,000 tokens of context; and what the fleet may add to a stream."""

TURN_MS = 1.5
"""Of all that a turn costs the controller."""

Figures = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Measure, print, claim."""
    modes: dict[str, Callable[[int], Claims]] = {
        "client": client,
        "turn": turn,
        "push": push,
        "fleet": fleet,
        "ray": ray,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", choices=[*modes, []], help="all without one; those but ray with --short")
    parser.add_argument("--rounds", type=int, help="of each measurement; by default as many as its mode needs")
    options = read_options(parser, rounds=1)
    needed = {"client": 40, "turn": 12, "push": 12, "fleet": 5, "ray": 5}
    chosen = options.modes or [name for name in modes if name != "ray" or not options.short]
    print(
        json.dumps({"claims": [claimed for name in chosen for claimed in modes[name](options.rounds or needed[name])]})
    )


@contextmanager
def free_server() -> Iterator[tuple[int, int]]:
    """Serve an engine that costs nothing in a process of its own; yield its port and its process id."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv(), process.pid or 0
    finally:
        process.terminate()
        process.join()


def client(rounds: int) -> Claims:
    """Measure a turn through the engine's client."""
    claims = []
    for context in (2_000, 32_000):
        with free_server() as (port, server_id):
            figures = asyncio.run(measured(port, server_id, context, rounds))
        medians = {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in figures.items()}
        for name, (client, server) in medians.items():
            print(f"{context:6} tokens, {name:14} client {client:.3f} ms, server {server:.2f} ms", flush=True)
        if context == 2_000:
            for name in ("whole prompt", "what is new"):
                claims.append(claim(f"client at 2,000 tokens, {name}", medians[name][0], "ms", TARGET_MS, "<="))
            added = statistics.median(
                fleet[0] - stream[0] for fleet, stream in zip(figures["fleet"], figures["stream"], strict=True)
            )
            claims.append(claim("what the fleet adds at 2,000 tokens", added, "ms", ADDED_MS, "<="))
    return claims


def turn(rounds: int) -> Claims:
    """Measure all that a turn costs the controller."""
    with free_server() as (port, _), tempfile.TemporaryDirectory() as folder:
        figures: dict[str, list[float]] = {"with the client": [], "without": []}
        for number in range(3):  # of each way, in turns
            store = f"{folder}/{number}"
            figures["with the client"] += asyncio.run(played(RemoteClient(f"http://127.0.0.1:{port}"), store, rounds))
            figures["without"] += asyncio.run(played(Free(), f"{store}-free", rounds))
    for name, steps in figures.items():
        low, high = min(steps), max(steps)
        print(f"a turn {name}: {statistics.median(steps):.2f} ms ({low:.2f} to {high:.2f})", flush=True)
    return [
        claim("scheduler, recorder, store and client", statistics.median(figures["with the client"]), "ms", TURN_MS)
    ]


async def measured(port: int, server: int, context: int, rounds: int) -> Figures:
    """Return the milliseconds of client and server per turn, of each round, by the way of asking."""
    client = RemoteClient(f"http://127.0.0.1:{port}")
    fleet: Fleet[Any] = Fleet([RemoteEngine(client.url)], room=2 * AT_ONCE, silent_s=1e6)
    figures: Figures = {name: [] for name in ("plain bytes", "whole prompt", "what is new", "stream", "fleet")}

    async def timed(name: str, works: Iterable[Coroutine[Any, Any, object]]) -> None:
        before = time.process_time(), processor_s(server)
        await asyncio.gather(*works)
        after = time.process_time(), processor_s(server)
        figures[name].append((1e3 * (after[0] - before[0]) / AT_ONCE, 1e3 * (after[1] - before[1]) / AT_ONCE))

    # the server closes what is idle while requests are prepared, so they are prepared ahead
    prepared = [[asked(f"{context}/{number}/{turn}", context, turn) for turn in range(AT_ONCE)] for number in range(8)]
    for number in range(rounds):
        whole = [replace(one, conversation=f"{number}/{one.id}") for one in prepared[number % 8]]
        first = [
            replace(one, conversation=f"first/{one.conversation}", tokens=one.tokens[LATER + NEW :]) for one in whole
        ]
        bodies = [wire.encode(wire.generate_form(one, deltas=False)) for one in whole]
        plain = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 20) for _ in bodies]
        answers = await asyncio.gather(*map(client.generate, first))
        then = [
            replace(one, tokens=(*one.tokens, *answer.tokens, *one.tokens[:LATER]))
            for one, answer in zip(first, answers, strict=True)
        ]
        await timed("plain bytes", map(sent, plain, bodies))
        await timed("whole prompt", map(client.generate, whole))
        await timed("what is new", map(client.generate, then))
        again = [[replace(one, conversation=f"{way}/{one.conversation}") for one in whole] for way in ("s", "f")]
        await timed("stream", (completion_of(client.stream(one)) for one in again[0]))
        await timed("fleet", map(fleet.generate, again[1]))
        for one in (*first, *whole, *again[0], *again[1]):
            await client.release(one.conversation or "")
        for _, writer in plain:
            writer.close()
    await fleet.close()
    return figures


def asked(name: str, length: int, seed: int) -> GenerateRequest:
    """A request with so many tokens."""
    draw = random.Random(name)
    tokens = tuple(draw.randrange(VOCABULARY) for _ in range(length))
    return GenerateRequest(id=name, tokens=tokens, sampling=Sampling(max_tokens=NEW, seed=seed))


async def sent(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: bytes) -> None:
    """Send a prepared body, and read the answer up to its end."""
    reader, writer = connection
    writer.write(b"POST /v1/generate HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await reader.readuntil(b"\r\n0\r\n\r\n")


def processor_s(process: int) -> float:
    """Return the processor seconds of the main thread of another process."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


class Free:
    """An engine that costs nothing."""

    problem, version, metrics, latencies = None, 0, dict[str, float](), Latencies()

    def __init__(self) -> None:
        draw = random.Random(0)
        self._completion = Completion(
            tokens=(*(draw.randrange(1, VOCABULARY) for _ in range(NEW - 1)), 0),
            logprobs=tuple(-draw.expovariate(1.0) for _ in range(NEW)),
            finish_reason="stop",
            versions=Runs.of(0, NEW),
            kv_versions=Runs.of(0, NEW),
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the same completion a pass of the loop later."""
        await asyncio.sleep(0)
        return self._completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield the completion in `PIECES` pieces, and as a whole."""
        whole, size = self._completion, NEW // PIECES
        for at in range(0, NEW, size):
            await asyncio.sleep(0)
            runs = Runs.of(0, size)
            tokens, logprobs = whole.tokens[at : at + size], whole.logprobs[at : at + size]
            yield Delta(tokens=tokens, logprobs=logprobs, versions=runs, kv_versions=runs)
        yield whole

    async def check(self) -> None:
        """Do nothing: nothing can fail."""

    async def release(self, conversation: str) -> None:
        """Do nothing: nothing is kept."""

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def serve(pipe: Any) -> None:
    """Serve until the process is killed."""
    listening = socket.create_server(("127.0.0.1", 0))
    served = wire.ServedModel(
        model="policy",
        version=0,
        dtype="float32",
        numerics="none",
        vocab_size=VOCABULARY,
        max_positions=1 << 20,
        context=1 << 16,
        token_bytes=1,
        instance="free",
    )
    engine: Any = Free()
    application = TokenServer(Serving(engine, served, lambda request: request)).application()
    config = uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off")
    pipe.send(listening.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
