"""`sparring gateway` as a process of its own in front of real sessions: what it is killed in is lost nowhere."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from sparring.gateway.proxied import proxied
from sparring.gateway.proxy import RunSocket
from sparring.gateway.run_socket import SOCKET
from sparring.gateway.server import open_door
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.record.recorder import RecordedSession, Recorder
from sparring.record.rewards import OutsideReward, OutsideRewards
from sparring.render.demonstrate import reply_tokens
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, ToolCall, ToolSpec, WeightRef

RENDERER = toy_renderer()
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}


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


class Rewarded:
    """A session of a run that takes rewards from outside."""

    def __init__(self, session: Any, rewards: OutsideRewards) -> None:
        self._session, self.rewards = session, rewards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Process:
    """A gateway in front of a run's folder, on a port of its own, that may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.kills = folder, 0, 0
        self.up = asyncio.Event()

    async def start(self) -> None:
        words = ("gateway", str(self.folder), "--port", str(self.port))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sparring.cli.main", *words), stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        assert line.startswith(f"gateway of {self.folder} on http://127.0.0.1:"), line
        self.port = int(line.rpartition(":")[2])
        self.up.set()

    async def kill(self) -> None:
        self.up.clear()
        self._process.kill()
        await self._process.wait()
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
    async with proxied(folder, "http://127.0.0.1:9"):
        await process.start()
        try:
            async with open_door(session) as door:
                assert door.url == "http://127.0.0.1:9"
                yield session, door, process
        finally:
            await process.kill()
    store.close()


async def streamed(process: Process, key: str, messages: Sequence[Any]) -> Any:
    """One turn of a client that sends a request again, byte by byte, whenever its connection breaks."""
    body = {"model": "policy", "messages": list(messages), "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    while True:
        await process.up.wait()
        text, finish = "", None
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as client,
                client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        text += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
        except httpx.TransportError:
            continue
        if finish is not None:
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
                if killed:
                    await process.start()
                engine.opened.set()
            messages.append(await reply)
            messages.append({"role": "user", "content": f"Go on, {turn}."})
            await engine.pull(published(2 * turn + 2))
        assert process.kills == killed * sum(stop is not None for stop in stops)
        *earlier, last = session.segments  # that the last reply was delivered may be under way to the run yet
        return (*earlier, replace(last, delivered=None)), messages, len(engine.requests)


def check_killed(tmp_path: Path, stops: Sequence[int | None]) -> None:
    """Check that a conversation whose gateway is killed is that of one whose gateway is not. Before the last turn, which
    is left alone, the run has heard that the others were delivered."""
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


def test_a_client_that_leaves_and_comes_again_at_once_gets_the_same_turn(tmp_path: Path) -> None:
    """And one that got its answer gets another: the run's process hears of both before the next request."""
    leaves = 10

    async def main() -> int:
        engine = Gated()
        async with rollout(tmp_path, engine) as (_, door, process):
            engine.shut_at = 3
            body = {"model": "policy", "messages": [{"role": "user", "content": "Begin."}], "stream": True}
            headers = {"authorization": f"Bearer {door.key}"}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", headers=headers) as client:
                for _ in range(leaves):
                    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        await anext(answer.aiter_lines())
            engine.opened.set()
            for number in range(3):
                assert (await streamed(process, door.key, body["messages"]))["content"] == said(number).content
            return len(engine.requests)

    assert asyncio.run(main()) == 3


def test_an_answer_that_nobody_read_is_given_again(tmp_path: Path) -> None:
    async def main() -> tuple[str, list[Any]]:
        loop, engine = asyncio.get_running_loop(), Gated()
        async with rollout(tmp_path, engine) as (session, door, process):
            sent = json.dumps(BODY).encode()
            head = f"authorization: Bearer {door.key}\r\nhost: gateway\r\ncontent-length: {len(sent)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", process.port)) as connection:
                connection.setblocking(False)
                asked = f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + sent
                await loop.sock_sendall(connection, asked)
                while not any(segment.delivered for segment in session.segments):
                    await asyncio.sleep(0)
            while not door.exchanges.broken:
                await asyncio.sleep(0)
            async with httpx.AsyncClient() as client:
                headers = {"authorization": f"Bearer {door.key}"}
                url = f"http://127.0.0.1:{process.port}/v1/chat/completions"
                again = (await client.post(url, headers=headers, json=BODY)).json()
            while door.exchanges.broken:
                await asyncio.sleep(0)
            labels = [(s.label, s.delivered) for s in session.segments if s.model is not None]
        return again["choices"][0]["message"]["content"], labels

    assert asyncio.run(main()) == (said(0).content, [("agent", True)])


def test_every_endpoint_answers_through_the_process(tmp_path: Path) -> None:
    """Whole answers with log-probabilities, counts, models, and refusals."""

    async def main() -> list[httpx.Response]:
        engine = ScriptedEngine(lambda request: reply_tokens(RENDERER, said(0)))
        async with rollout(tmp_path, engine) as (_, door, process):
            key = {"authorization": f"Bearer {door.key}"}
            body = {"model": "policy", "messages": [{"role": "user", "content": "Hi\u2028there"}]}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", headers=key) as client:
                answers = [
                    await client.post("/v1/chat/completions", json={**body, "logprobs": True}),
                    await client.post("/v1/messages", json={**body, "max_tokens": 3}),
                    await client.post("/v1/messages/count_tokens", json=body),
                    await client.get("/v1/models"),
                    await client.post("/v1/chat/completions", json={**body, "model": "gpt-9"}),
                    await client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-no"}),
                    await client.post("/v1/chat/completions", json={**body, "max_tokens": 2}, headers=key),
                    await client.post("/v1/chat/completions", json={**body, "stream": "false"}),
                    await client.post(
                        "/v1beta/models/policy:streamGenerateContent", json={"contents": [{"parts": [{"text": "Hi"}]}]}
                    ),
                ]
                await client.post("/v1/chat/completions", json=body)
            return answers

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 404, 401, 200, 400, 200]
    choice = answers[0].json()["choices"][0]
    assert choice["message"]["content"] == said(0).content
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]).startswith(said(0).content)
    assert answers[1].json()["stop_reason"] == "max_tokens"
    assert answers[2].json()["input_tokens"] == answers[0].json()["usage"]["prompt_tokens"]
    assert [row["id"] for row in answers[3].json()["data"]] == ["policy"]
    assert answers[7].json()["error"]["param"] == "stream" and answers[7].headers["x-request-id"]
    chunks = answers[8].json()
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert len(chunks) > 1 and "".join(part["text"] for part in parts) == said(0).content


def test_a_split_character_has_its_bytes_through_the_process(tmp_path: Path) -> None:
    text = "Grüße, 世界 🙂!"
    tokens = reply_tokens(RENDERER, Message(role="assistant", content=text))

    async def main() -> list[Any]:
        async with rollout(tmp_path, ScriptedEngine(lambda request: tokens)) as (_, door, process):
            base_url = f"http://127.0.0.1:{process.port}/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key=door.key, max_retries=0) as client:
                messages: Any = [{"role": "user", "content": "Hi"}]
                chat = await client.chat.completions.create(model="policy", messages=messages, logprobs=True)
                include: Any = ["message.output_text.logprobs"]
                response: Any = await client.responses.create(model="policy", input="Hi", include=include)
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        return [logprobs.content, response.output[0].content[0].logprobs]

    for listed in asyncio.run(main()):
        data = b"".join(bytes(token.bytes) for token in listed)
        assert data == RENDERER.decode(tokens).encode() and data.startswith(text.encode())


class Passing:
    """A gateway that passes single requests on to a run, and is killed when the test says so."""

    def __init__(self, folder: Path, key: str) -> None:
        self.run, self._key = RunSocket(folder), key
        self._words = self.run.words()

    async def begin(self) -> None:
        """Take over from the gateway before: no door opens without one."""
        await anext(self._words)

    async def send(self, *texts: str) -> asyncio.StreamReader:
        """Send a request with these messages, the client's and the policy's in turn; return what reads the answer."""
        reader, roles = asyncio.StreamReader(), itertools.cycle(("user", "assistant"))
        to_run = await self.run.open(asyncio.StreamReaderProtocol(reader), ("127.0.0.1", 9), None)
        messages = [{"role": next(roles), "content": text} for text in texts]
        to_run.write(posted(self._key, {"model": "policy", "messages": messages}))
        return reader

    async def read(self, *texts: str) -> str:
        """Return the text of the answer, which is read to its end; nobody says whether the client got it."""
        return await whole(await self.send(*texts))

    async def close(self) -> None:
        await self._words.aclose()
        self.run.close()


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


def test_what_a_dead_gateway_had_whole_is_lost_only_if_nobody_can_have_it(tmp_path: Path) -> None:
    """It is the equal request's that follows, and counts as delivered where none does. What the gateway had in part is
    lost until its request comes again."""

    async def main() -> tuple[list[str], list[Any], list[Any]]:
        engine = Gated()
        session = recorded(engine)
        async with proxied(tmp_path, "http://127.0.0.1:9"):
            early = Passing(tmp_path, "")
            await early.begin()
            async with open_door(session) as door:
                before, after = Passing(tmp_path, door.key), Passing(tmp_path, door.key)
                await before.begin()
                texts = [await before.read("Begin."), await before.read("Another.")]
                engine.shut_at = 3
                await before.send("The third.")
                await engine.waits.wait()
                engine.waits.clear()
                await before.send("The fourth.")
                await engine.waits.wait()
                await after.begin()
                engine.opened.set()
                await asyncio.gather(*(exchange.sampling for exchange in door.exchanges.under_way))
                labels = [(s.label, s.delivered) for s in session.segments if s.model is not None]
                texts.append(await after.read("Begin."))
                texts.append(await after.read("Another.", texts[1], "Go on."))
                texts.append(await after.read("The third.", str(said(2).content), "Go on."))
                texts.append(await after.read("The fourth."))
                later = [(s.label, s.delivered) for s in session.segments if s.model is not None]
                for gateway in (early, before, after):
                    await gateway.close()
        return texts, labels, later

    texts, labels, later = asyncio.run(main())
    assert texts == [said(number).content for number in (0, 1, 0, 4, 5, 3)]
    assert labels == [("agent", None)] * 2 + [("lost", False)] * 2
    assert later[:4] == [("agent", True), ("agent", None), ("agent", True), ("agent", True)]


class Adding:
    """Adds; implements `protocols.ToolHost`."""

    tools = (ToolSpec(name="add", description="Add.", parameters={"type": "object"}),)

    async def call(self, call: ToolCall) -> str:
        return str(sum((call.arguments or {}).values()))


@pytest.mark.slow
def test_what_was_told_or_said_is_continued_by_its_id_behind_a_kill(tmp_path: Path) -> None:
    """A response, an item of it, and what is only told: all are there for the next gateway."""

    async def main() -> tuple[list[Any], list[str]]:
        engine = Gated()
        async with rollout(tmp_path, engine) as (session, door, process):

            async def ask(**values: Any) -> Any:
                headers = {"authorization": f"Bearer {door.key}"}
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", headers=headers) as client:
                    answer = await client.post("/v1/responses", json={"model": "policy", **values})
                assert answer.status_code == (400 if values["input"] == "?" else 200), answer.text
                return answer.json()

            first = await ask(input="Begin.")
            heard = await ask(input="Only told.", generate=False)
            await process.kill()
            await process.start()
            second = await ask(input="Go on.", previous_response_id=first["id"])
            reference = {"type": "item_reference", "id": second["output"][0]["id"]}
            third = await ask(input=[{"role": "user", "content": "Anew."}, reference, {"role": "user", "content": "?"}])
            fourth = await ask(input=[], previous_response_id=heard["id"])
            refused = await ask(input="?", previous_response_id=fourth["id"] + "x")
            assert "the id of a response under this key" in refused["error"]["message"]
            told = [RENDERER.decode(request.tokens) for request in engine.requests]
            assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, None, 4, None, 6]
            return [first, second, third, fourth], told

    answers, told = asyncio.run(main())
    texts = [answer["output"][0]["content"][0]["text"] for answer in answers]
    assert texts == [said(number).content for number in range(4)]
    assert "Begin." in told[1] and texts[0] in told[1] and texts[1] in told[2] and "Only told." in told[3]


def test_the_worlds_tools_are_called_through_the_process(tmp_path: Path) -> None:
    async def main() -> list[httpx.Response]:
        async with rollout(tmp_path, Gated()) as (_, door, process):
            call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call"}
            call["params"] = {"name": "add", "arguments": {"a": 40, "b": 2}}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}") as client:
                none = await client.post(f"/k/{door.key}/mcp", json=call)
                door.tools = Adding()
                return [
                    none,
                    await client.post(f"/k/{door.key}/mcp", json=call),
                    await client.post("/mcp", json=call, headers={"x-api-key": door.key}),
                    await client.post("/mcp", json=call, headers={"x-api-key": "sk-no"}),
                    await client.get(f"/mcp?key={door.key}"),
                ]

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [404, 200, 200, 401, 405]
    assert (
        answers[1].json()["result"]["content"][0]["text"] == answers[2].json()["result"]["content"][0]["text"] == "42"
    )
    assert answers[4].headers["allow"] == "POST"


class Waiting:
    """Counts its calls, which wait for a word each; implements `protocols.ToolHost`."""

    tools = Adding.tools

    def __init__(self) -> None:
        self.begun = 0
        self.goes_on = asyncio.Event()

    async def call(self, call: ToolCall) -> str:
        self.begun += 1
        await self.goes_on.wait()
        return f"call {self.begun}" + " " * (32 << 20)  # more than what lies between a server and who does not read


@pytest.mark.parametrize("breaks", ["client", "gateway", "answered"])
def test_a_call_that_breaks_at_the_process_runs_once(tmp_path: Path, breaks: str) -> None:
    """Its client leaves while it runs, the gateway is killed then, or behind the answer that its client did not read."""

    async def main() -> tuple[list[str], int]:
        host = Waiting()
        async with rollout(tmp_path, Gated()) as (_, door, process):
            door.tools = host
            call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "add"}}
            headers = {"x-api-key": door.key, "mcp-session-id": "s-1"}

            async def called() -> str:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as client:
                    async with client.stream("POST", "/mcp", json=call, headers=headers) as answer:
                        first_answers.set()
                        await reads.wait()
                        return json.loads(await answer.aread())["result"]["content"][0]["text"].strip()

            first_answers, reads = asyncio.Event(), asyncio.Event()
            first = asyncio.create_task(called())
            while not host.begun:
                await asyncio.sleep(0)
            if breaks == "answered":
                host.goes_on.set()
                await first_answers.wait()
            if breaks == "client":
                first.cancel()
            else:
                await process.kill()
                await process.start()
            reads.set()
            await asyncio.gather(first, return_exceptions=True)
            again = asyncio.create_task(called())
            host.goes_on.set()
            return [await again, await called()], host.begun

    assert asyncio.run(main()) == (["call 1", "call 2"], 2)


@pytest.mark.slow
def test_rewards_are_given_through_the_process(tmp_path: Path) -> None:
    """As long as the rollout awaits them, also when its door is shut; then they are late."""

    async def main() -> tuple[list[int], list[str], list[OutsideReward]]:
        taken: list[OutsideReward] = []
        rewards = OutsideRewards("rl/0/0", 60.0, record=lambda data: taken.append(msgspec.convert(data, OutsideReward)))
        async with rollout(tmp_path, Gated()) as (session, door, process):
            async with open_door(Rewarded(session, rewards)) as other:
                url = f"http://127.0.0.1:{process.port}"
                begun = [{"role": "user", "content": "Begin."}]
                await streamed(process, other.key, begun)
                async with httpx.AsyncClient(base_url=url, headers={"x-api-key": other.key}) as client:
                    of = (await client.post("/v1/messages", json={**BODY, "max_tokens": 50})).json()["id"]
            bodies = (
                {"reward": 0.5, "of": of},
                {"reward": 1.0},
                {"reward": "high"},
                {"reward": 1.0, "of": "rl/0/0#99"},
            )
            async with httpx.AsyncClient(base_url=url, headers={"x-api-key": other.reward_key}) as client:
                answers = [await client.post("/v1/rewards", json=body) for body in bodies]
                answers.append(await client.post("/v1/rewards", json=bodies[1], headers={"x-api-key": door.key}))
                await rewards.close()
                answers.append(await client.post("/v1/rewards", json=bodies[1]))
        kinds = [answer.json().get("error", {}).get("type", "") for answer in answers]
        return [answer.status_code for answer in answers], kinds, taken

    statuses, kinds, taken = asyncio.run(main())
    assert statuses == [200, 200, 400, 404, 403, 410]
    assert kinds == ["", "", "invalid_request", "unknown_reply", "no_rewards", "expired"]
    assert [(reward.reward, reward.of) for reward in taken] == [(0.5, "rl/0/0#3"), (1.0, None)]


@pytest.mark.parametrize("socket", [False, True])
def test_a_run_that_is_not_going_on_is_refused(
    tmp_path: Path, socket: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparring.cli.main import main

    async def left() -> None:
        """A socket as a run leaves it that was killed."""
        async with proxied(tmp_path, "http://127.0.0.1:9"):
            (tmp_path / "kept").hardlink_to(tmp_path / SOCKET)

    if socket:
        asyncio.run(left())
        (tmp_path / "kept").rename(tmp_path / SOCKET)
    assert main(["gateway", str(tmp_path), "--port", "0"]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}: expected a run that is going on")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, sparring.cli.gateway, sparring.launch.gateway, sparring.gateway.proxied\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
