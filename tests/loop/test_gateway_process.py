"""`sparring gateway` as a process of its own in front of real sessions: a client does not notice that it is killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked import Forked

from sparring.gateway.handover import behind_gateway
from sparring.gateway.run_socket import SOCKET
from sparring.gateway.server import open_door
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, WeightRef

RENDERER = toy_renderer()


class Gated(ScriptedEngine):
    """An engine whose turn waits behind some of its tokens while its gate is shut.

    Attributes:
        shut_at: number of tokens; None: the gate is open.
        waits: set while a turn waits.
        opened: lets it go on.
    """

    def __init__(self) -> None:
        numbers = itertools.count()
        super().__init__(lambda request: reply_tokens(RENDERER, said(next(numbers))))
        self.shut_at: int | None = None
        self.waits, self.opened = asyncio.Event(), asyncio.Event()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield each token, up to the gate."""
        number = 0
        async for piece in super().stream(request):
            yield piece
            number += 1
            if number == self.shut_at:
                self.waits.set()
                await self.opened.wait()


def published(version: int) -> WeightRef:
    return WeightRef(model="policy", version=version, checksum="", transport="", location=None)


def said(number: int) -> Message:
    return Message(role="assistant", content=f"reply number {number} of a few words")


class Process:
    """A gateway in front of a run's folder, on a port of its own, that may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.kills = folder, 0, 0
        self.up = asyncio.Event()

    async def start(self) -> None:
        self._process = Forked(("gateway", self.folder, "--port", self.port), stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line.startswith(f"gateway of {self.folder} on http://127.0.0.1:"), line
        self.port = int(line.rpartition(":")[2])
        self.up.set()

    async def kill(self) -> None:
        self.up.clear()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.kills += 1


def recorded(engine: ScriptedEngine, store: SqliteStore | None = None) -> RecordedSession:
    limits = Limits(max_turns=200, max_tokens=40_000)
    recorder = Recorder(engine, RENDERER, store, max_context=30_000)
    return recorder.open(toy_task(), rollout_id="rl/0/0", seed=7, limits=limits)


@asynccontextmanager
async def rollout(folder: Path, engine: ScriptedEngine) -> AsyncIterator[tuple[Any, Any, Process]]:
    """A session with a store, its door, and the gateway's process in front of it."""
    store, process = SqliteStore(folder / "store.sqlite"), Process(folder)
    session = recorded(engine, store)
    async with behind_gateway(folder, "http://127.0.0.1:9"):
        await process.start()
        try:
            async with open_door(session) as door:
                assert door.url == "http://127.0.0.1:9"
                yield session, door, process
        finally:
            await process.kill()
    store.close()


async def streamed(process: Process, key: str, messages: Sequence[Any]) -> Any:
    """One turn of a client that sends its request once, whatever happens to the gateway."""
    await process.up.wait()
    body = {"model": "policy", "messages": list(messages), "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    text = ""
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    assert line == "" or line == "data: [DONE]"
    return {"role": "assistant", "content": text}


async def conversation(folder: Path, stops: Sequence[int | None], killed: bool) -> tuple[Any, Any, int]:
    """Hold a conversation of as many turns, with an update of the weights within some and behind each.

    Args:
        folder: of the run.
        stops: number of sampled tokens behind which the weights are updated, by turn; None: they are not.
        killed: whether the gateway is killed at these moments.

    Returns:
        What was recorded, what the client read, and the number of requests that the engine saw.
    """
    engine = Gated()
    async with rollout(folder, engine) as (session, door, process):
        messages: list[Any] = [{"role": "user", "content": "Begin."}]
        for turn, stop in enumerate(stops):
            engine.shut_at = stop
            engine.waits.clear()
            engine.opened.clear()
            reply = asyncio.ensure_future(streamed(process, door.key, messages))
            if stop is not None:
                await engine.waits.wait()
                if killed:
                    await process.kill()
                await engine.pull(published(2 * turn + 1))
                if killed and turn % 2:  # else the stream ends without a gateway
                    await process.start()
                engine.opened.set()
            messages.append(await reply)
            if killed and not process.up.is_set():
                await process.start()
            messages.append({"role": "user", "content": f"Go on, {turn}."})
            await engine.pull(published(2 * turn + 2))
        assert process.kills == killed * sum(stop is not None for stop in stops)
        return session.segments, messages, len(engine.requests)


def check_killed(tmp_path: Path, stops: Sequence[int | None]) -> None:
    """Check that a conversation whose gateway is killed is that of one whose gateway is not."""
    recorded = []
    for killed in (False, True):
        folder = tmp_path / f"killed {killed}"
        folder.mkdir()
        recorded.append(asyncio.run(conversation(folder, stops, killed)))
    assert recorded[0] == recorded[1]
    segments, messages, requests = recorded[0]
    sampled = [segment for segment in segments if segment.model is not None]
    assert requests == len(sampled) == len(stops)
    assert [said(number).content for number in range(len(stops))] == [m["content"] for m in messages[1::2]]
    versions = [2 * turn + (stop is not None) for turn, stop in enumerate(stops)]
    assert [segment.versions.values[-1] for segment in sampled] == versions


def test_a_gateway_that_is_killed_in_mid_stream_loses_and_doubles_nothing(tmp_path: Path) -> None:
    check_killed(tmp_path, [1, None, 9, 16, None])


@pytest.mark.kills
@pytest.mark.slow
def test_a_hundred_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    chance = random.Random(5)
    check_killed(tmp_path, [*(chance.randrange(1, 20) for _ in range(100)), None])


def posted(key: str, body: Any) -> bytes:
    """A request for a chat completion."""
    data = json.dumps(body).encode()
    head = f"authorization: Bearer {key}\r\nhost: gateway\r\ncontent-length: {len(data)}\r\n\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + data


async def whole(reader: asyncio.StreamReader) -> str:
    """The text of a whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return str(json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"])


@pytest.mark.parametrize("unread", [False, True])
def test_the_end_of_a_connection_comes_before_the_next_request_on_another(tmp_path: Path, unread: bool) -> None:
    """A client that leaves and sends its request again at once, on a connection that is open already, gets the same
    turn; one that got its answer gets another."""
    rounds = 5

    async def main() -> tuple[list[str], int]:
        loop, engine, texts = asyncio.get_running_loop(), Gated(), []
        async with rollout(tmp_path, engine) as (_, door, process):
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            for number in range(rounds):
                body = {"model": "policy", "messages": [{"role": "user", "content": f"Begin, {number}."}]}
                engine.shut_at = 3
                engine.waits.clear()
                engine.opened.clear()
                with socket.create_connection(("127.0.0.1", process.port)) as first:
                    first.setblocking(False)
                    await loop.sock_sendall(first, posted(door.key, {**body, "stream": True}))
                    await engine.waits.wait()
                    await loop.sock_recv(first, 1)
                    if not unread:
                        first.shutdown(socket.SHUT_WR)
                    else:
                        first.close()
                    writer.write(posted(door.key, body))
                    answer = asyncio.ensure_future(whole(reader))
                    while not door.exchanges.under_way[-1].broken:
                        await asyncio.sleep(0)
                    engine.opened.set()
                    texts.append(await answer)
                    engine.shut_at = None
                    writer.write(posted(door.key, body))
                    texts.append(await whole(reader))
            writer.close()
        return texts, len(engine.requests)

    assert asyncio.run(main()) == ([said(number).content for number in range(2 * rounds)], 2 * rounds)


@pytest.mark.parametrize("socket", [False, True])
def test_a_run_that_is_not_going_on_is_refused(
    tmp_path: Path, socket: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparring.cli.main import main

    async def left() -> None:
        """A socket as a run leaves it that was killed."""
        async with behind_gateway(tmp_path, "http://127.0.0.1:9"):
            (tmp_path / "kept").hardlink_to(tmp_path / SOCKET)

    if socket:
        asyncio.run(left())
        (tmp_path / "kept").rename(tmp_path / SOCKET)
    assert main(["gateway", str(tmp_path), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: expected a run that is going on")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, sparring.cli.gateway, sparring.launch.gateway, sparring.gateway.handover\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
