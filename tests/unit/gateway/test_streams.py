"""Streams, broken connections and repeated requests, through the vendors' clients and raw sockets: a reply is sampled
once, shown as it comes, and given again to who did not get it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import httpx
import openai
import pytest
from sessions import ADD, RENDERER, opened, said, says, through
from starlette.types import Receive, Scope, Send
from suite import short_of

from sparring.errors import EngineError
from sparring.gateway.client_protocol import WHEN_BROKEN
from sparring.gateway.server import Door, open_door
from sparring.gateway.serving import LocalServer, server_settings
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.record.recorder import RecordedSession
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.types import Message

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
REPLY = said("Let me see what that is.", ("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}))
ASKS: dict[str, Any] = {"model": "policy", "max_tokens": 400, "messages": [{"role": "user", "content": "1 + 2?"}]}
TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]}
TOOLS = {CHAT: [ADD], MESSAGES: [TOOL]}


class Stepping(ScriptedEngine):
    """A scripted engine that makes each token when it is let."""

    def __init__(self, message: Message = REPLY, steps: int = 0) -> None:
        super().__init__(lambda request: reply_tokens(RENDERER, message, []))
        self.steps, self.begun, self.breaks = asyncio.Semaphore(steps), asyncio.Event(), False

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the end of the stream."""
        *_, completion = [piece async for piece in self.stream(request)]
        assert isinstance(completion, Completion)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield the script's tokens, one for each step."""
        async for piece in super().stream(request):
            self.begun.set()
            if not isinstance(piece, Completion):
                await self.steps.acquire()
                if self.breaks:
                    self.breaks = False
                    raise EngineError("the engine is gone")
            yield piece

    async def abort(self, request: str) -> None:
        """End a request; what it waits for comes."""
        await super().abort(request)
        self.steps.release()

    def let(self, steps: int = 500) -> None:
        """Let it make so many tokens."""
        for _ in range(steps):
            self.steps.release()


def body(path: str, **values: Any) -> dict[str, Any]:
    return {**ASKS, "tools": TOOLS[path], **values}


def sampled(session: RecordedSession) -> list[Any]:
    return [segment for segment in session.segments if segment.model is not None]


def told(path: str, text: str) -> tuple[str, list[Any]]:
    """The text and the calls of an answer, streamed or whole."""
    if not text.startswith("{"):
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        if path == CHAT:
            deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
            calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            return "".join(delta.get("content") or "" for delta in deltas), calls
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        inputs = [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
        return "".join(delta.get("text", "") for delta in deltas), inputs
    whole = json.loads(text)
    if path == CHAT:
        message = whole["choices"][0]["message"]
        return message["content"] or "", [call["function"] for call in message.get("tool_calls", ())]
    blocks = whole["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [block["input"] for block in blocks if block["type"] == "tool_use"]


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def broken_after(client: httpx.AsyncClient, path: str, count: int, **values: Any) -> str:
    """Send a request and break its connection after so many bytes of the answer."""
    text = ""
    async with client.stream("POST", path, json=body(path, **values)) as response:
        async for chunk in response.aiter_text():
            text += chunk
            if len(text) >= count:
                break
    return text


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_events_are_sent_while_the_reply_is_sampled(path: str) -> None:
    engine = Stepping(steps=5)
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> str:
        text = ""
        async with client.stream("POST", path, json=body(path, stream=True)) as response:
            async for chunk in response.aiter_text():
                text += chunk
                if "Let" in told(path, text)[0] and not sampled(session):
                    engine.let()
        return text

    text = through(session, talk)
    (segment,) = sampled(session)
    assert told(path, text)[0] == "Let me see what that is." and len(told(path, text)[1]) == 2
    assert segment.label == "agent" and segment.delivered is not False


PINGS = {CHAT: ": ping", MESSAGES: "event: ping", "/v1/responses": ": ping"}


@pytest.mark.parametrize("path", PINGS)
def test_waiting_clients_get_keep_alive_events(path: str) -> None:
    engine = Stepping()
    session = opened(engine)
    asks = {**ASKS, "stream": True}
    if path == "/v1/responses":
        asks = {"model": "policy", "stream": True, "input": ASKS["messages"]}

    async def talk(client: httpx.AsyncClient, door: Door) -> list[str]:
        door.ping_s = 0.001
        lines: list[str] = []
        async with client.stream("POST", path, json=asks) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if line == PINGS[path] and lines.count(line) == 2:
                    engine.let(3)
                elif line == PINGS[path] and any(map(is_of_the_reply, lines)):
                    engine.let()
        return lines

    def is_of_the_reply(line: str) -> bool:
        return line.startswith("data: {") and '"ping"' not in line

    lines = through(session, talk)
    pings = [at for at, line in enumerate(lines) if line == PINGS[path]]
    first = next(at for at, line in enumerate(lines) if is_of_the_reply(line))
    assert pings[0] == 0 and pings[1] < first < pings[-1], "the door's own seconds, not ten"
    (segment,) = sampled(session)
    assert segment.delivered and segment.label == "agent"


@pytest.mark.parametrize("path", short_of([CHAT, MESSAGES], [MESSAGES]))
def test_a_request_whose_connection_broke_is_the_same_turn(path: str) -> None:
    async def answers(session: RecordedSession, engine: Stepping, when: str, streams: tuple[bool, bool]) -> list[str]:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url, timeout=30) as client:
            client.headers["x-api-key"] = door.key
            first = asyncio.create_task(client.post(path, json=body(path, stream=streams[0])))
            await engine.begun.wait()
            first.cancel()
            await until(lambda: door.exchanges.broken)
            if when == "behind":
                engine.let()
                await until(lambda: not door.exchanges.under_way)
                assert sampled(session)[0].label == "lost"
            again = asyncio.create_task(client.post(path, json=body(path, stream=streams[1])))
            await until(lambda: not door.exchanges.broken)
            beside = asyncio.create_task(client.post(path, json=body(path, stream=streams[1])))
            if when != "behind":
                await until(lambda: len(door.exchanges.under_way) == 2)
            engine.let()
            return [(await again).text, (await beside).text]

    async def main() -> None:
        async with open_door(opened(says())):  # the server stays
            for when, *streams in product(("before", "during", "behind"), (True, False), (True, False)):
                engine = Stepping(steps=0 if when == "before" else 5)
                session = opened(engine)
                again, beside = await answers(session, engine, when, (streams[0], streams[1]))
                assert told(path, again) == told(path, beside)
                assert told(path, again)[0] == REPLY.content and len(told(path, again)[1]) == 2
                labels = [segment.label for segment in sampled(session)]
                assert labels == ["agent"] * 2, "an open connection is a sample of its own"

    asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_repeated_delivered_request_is_a_new_sample_unless_marked_as_a_retry(path: str) -> None:
    session = opened(says(REPLY, said("Another one.")))

    async def talk(client: httpx.AsyncClient, door: Door) -> list[str]:
        retry = {"x-stainless-retry-count": "1"}
        first = await client.post(path, json=body(path))
        again = await client.post(path, json=body(path, stream=True), headers=retry)
        other = await client.post(path, json=body(path), headers={"x-stainless-retry-count": "0"})
        return [answer.text for answer in (first, again, other)]

    first, again, other = through(session, talk)
    assert told(path, first) == told(path, again) and told(path, other)[0] == "Another one."
    assert len(sampled(session)) == 2


@pytest.mark.parametrize(("path", "stream"), list(product((CHAT, MESSAGES), (True, False))))
@pytest.mark.parametrize("reads", [False, True])
def test_an_undelivered_answer_is_sent_again(path: str, stream: bool, reads: bool) -> None:
    """It is with the client's machine when the connection breaks: who leaves without reading it breaks the connection,
    who has read it closes it."""
    session = opened(says(REPLY, said("Another one.")))

    async def talk(client: httpx.AsyncClient, door: Door) -> str:
        loop = asyncio.get_running_loop()
        wanted = client.build_request(
            "POST", path, json=body(path, stream=stream), headers={"connection": "keep-alive"}
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in wanted.headers.items())
        with socket.create_connection((wanted.url.host, wanted.url.port)) as connection:
            connection.setblocking(False)
            await loop.sock_sendall(connection, f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + wanted.content)
            await until(lambda: sampled(session) and sampled(session)[0].delivered)
            if reads:
                text = b""
                while not text.endswith(b"0\r\n\r\n" if stream else b"}"):
                    text += await loop.sock_recv(connection, 1 << 20)
        if not reads:
            await until(lambda: door.exchanges.broken)
        assert sampled(session)[0].label == "agent", "nobody knows that it is lost"
        return (await client.post(path, json=body(path, stream=not stream))).text

    again = through(session, talk)
    assert told(path, again)[0] == ("Another one." if reads else REPLY.content)
    assert [segment.label for segment in sampled(session)] == ["agent"] * (1 + reads)


@pytest.mark.parametrize("pipelined", [1, 2])
def test_an_answer_to_a_client_that_has_closed_is_broken(pipelined: int) -> None:
    """The client's end is orderly, since it had nothing to read yet, and waits to be read when the answer is sent."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        broken = loop.create_future()

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if client.fileno() >= 0:  # the first request
                scope[WHEN_BROKEN] = lambda: broken.set_result(None)
                client.close()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

        listening = socket.create_server(("127.0.0.1", 0))
        server = LocalServer(server_settings(application))
        serving = loop.create_task(server.serve(sockets=[listening]))
        client = socket.create_connection(listening.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nhost: gateway\r\n\r\n" * pipelined)
        await broken
        server.should_exit = True
        await serving
        listening.close()

    asyncio.run(main())


def test_a_retried_request_joins_a_running_one() -> None:
    engine = Stepping()
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> list[str]:
        first = asyncio.create_task(client.post(CHAT, json=body(CHAT, stream=True)))
        await engine.begun.wait()
        retry = {"x-stainless-retry-count": "2"}
        again = asyncio.create_task(client.post(CHAT, json=body(CHAT), headers=retry))
        await until(lambda: len(door.exchanges.under_way[0].wakers) == 2)
        engine.let()
        return [(await first).text, (await again).text]

    first, again = through(session, talk)
    assert told(CHAT, first) == told(CHAT, again) and len(sampled(session)) == 1


def test_requests_of_other_agents_samples_and_contents_are_separate_turns() -> None:
    engine = Stepping()
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> None:
        tasks = [
            asyncio.create_task(client.post(MESSAGES, json=body(MESSAGES), headers={"x-claude-code-agent-id": agent}))
            for agent in ("a", "b")
        ]
        await until(lambda: len(door.exchanges.under_way) == 2)
        for task in tasks:
            task.cancel()
        await until(lambda: len(door.exchanges.broken) == 2)
        engine.let(2000)
        other = await client.post(MESSAGES, json={**body(MESSAGES), "max_tokens": 399})
        samples = await client.post(CHAT, json=body(CHAT, n=2, stream=True))
        assert other.status_code == samples.status_code == 200

    through(session, talk)
    assert len(sampled(session)) == 5


def test_a_retry_of_a_failed_request_is_the_same_turn() -> None:
    engine = Stepping(steps=5)
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> tuple[str, str]:
        parts = []
        async with client.stream("POST", CHAT, json=body(CHAT, stream=True)) as response:
            async for chunk in response.aiter_text():
                parts.append(chunk)
                if "Let" in told(CHAT, "".join(parts))[0] and not engine.breaks and "error" not in chunk:
                    engine.breaks = True
                    engine.let(1)
        engine.let()
        return "".join(parts), (await client.post(CHAT, json=body(CHAT, stream=True))).text

    broken, again = through(session, talk)
    assert (
        "the engine is gone" in broken
        and "[DONE]" not in broken
        and told(CHAT, again)[0].startswith(told(CHAT, broken)[0])
    )
    seeds = {request.sampling.seed for request in engine.requests}
    assert len(engine.requests) == 2 and len(seeds) == 1 and len(sampled(session)) == 1


def test_a_client_of_the_vendor_reads_the_stream_and_repeats_a_broken_one() -> None:
    engine = Stepping(steps=5)
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key, max_retries=2) as vendor:
            asks: Any = {"model": "policy", "messages": ASKS["messages"], "tools": [ADD]}
            async with vendor.chat.completions.stream(**asks) as stream:
                async for _ in stream:
                    break
            await until(lambda: door.exchanges.broken)
            engine.let()
            async with vendor.chat.completions.stream(**asks) as stream:
                return await stream.get_final_completion()

    whole = through(session, talk)
    assert whole.choices[0].message.content == REPLY.content and whole.choices[0].finish_reason == "tool_calls"
    assert len(whole.choices[0].message.tool_calls) == 2 and len(sampled(session)) == 1


@pytest.mark.extra
def test_anthropics_client_reads_pings_and_repeats_a_broken_stream() -> None:
    import anthropic

    engine = Stepping()
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        door.ping_s = 0.001
        async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.key) as vendor:
            asks: Any = {"model": "policy", "max_tokens": 400, "messages": ASKS["messages"], "tools": [TOOL]}
            asking = asyncio.create_task(vendor.messages.create(**asks, stream=True))
            await engine.begun.wait()
            broken = await asking  # a ping answers before the first token
            engine.let(5)
            assert (await anext(broken)).type == "message_start"
            await broken.close()
            await until(lambda: door.exchanges.broken)
            engine.let()
            async with vendor.messages.stream(**asks) as stream:
                types = [event.type async for event in stream]
                return types, await stream.get_final_message()

    types, whole = through(session, talk)
    assert types[0] == "message_start" and types[-1] == "message_stop"
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"] and len(sampled(session)) == 1
    assert whole.content[0].text == REPLY.content and whole.content[2].input == {"a": 3, "b": 4}


def test_running_replies_are_lost_when_the_program_ends() -> None:
    engine = Stepping(steps=5)
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> None:
        reading = asyncio.create_task(broken_after(client, CHAT, 10**6, stream=True))
        await until(lambda: door.exchanges.under_way and len(door.exchanges.under_way[0].parts) > 2)
        reading.cancel()

    through(session, talk)
    (segment,) = sampled(session)
    assert (segment.finish_reason, segment.label) == ("abort", "lost") and session.limit is None


def test_running_replies_are_dropped_when_the_rollout_is_cancelled() -> None:
    engine = Stepping(steps=5)
    session = opened(engine)

    async def main() -> None:
        async def harness() -> None:
            async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
                headers = {"authorization": f"Bearer {door.key}"}
                await client.post(CHAT, json=body(CHAT, stream=True), headers=headers)

        running = asyncio.create_task(harness())
        await engine.begun.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert session.segments == ()


def test_a_refused_request_changes_nothing() -> None:
    session = opened(says(REPLY), max_turns=1)

    async def talk(client: httpx.AsyncClient, door: Door) -> list[int]:
        answers = [await client.post(CHAT, json=body(CHAT, n=-1)), await client.post(CHAT, json=body(CHAT))]
        answers.append(await client.post(CHAT, json=body(CHAT)))
        answers.append(await client.post(CHAT, json=body(CHAT), headers={"x-stainless-retry-count": "1"}))
        assert answers[2].headers["x-should-retry"] == "false"
        return [answer.status_code for answer in answers]

    assert through(session, talk) == [400, 200, 400, 200]
    assert session.limit is not None and session.limit.reason == "max_turns" and len(sampled(session)) == 1


def test_old_exchanges_are_dropped() -> None:
    session = opened(says(*(said(str(number)) for number in range(66))), max_turns=100)

    async def talk(client: httpx.AsyncClient, door: Door) -> int:
        for number in range(66):
            await client.post(CHAT, json={**ASKS, "messages": [{"role": "user", "content": str(number)}]})
        return len(door.exchanges)

    assert through(session, talk) == 64
