"""Bodies that no prompt of the context has are refused in their vendor's words before they are converted or rendered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from sparring.gateway.body_reader import MOST_BYTES, MUCH_VALUES, Room, has_more, values_at_most
from sparring.gateway.server import open_door
from sparring.record.recorder import RecordedSession, Recorder
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task

TOY = toy_renderer()
CONTEXT = 1000
GEMINI = "/v1beta/models/policy:generateContent"


class Unrendered:
    """A renderer that counts what it is asked to render."""

    def __init__(self) -> None:
        self.renders = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOY, name)

    def render(self, *arguments: Any, **named: Any) -> Any:
        self.renders += 1
        return TOY.render(*arguments, **named)


def call(number: int) -> list[dict[str, Any]]:
    arguments = json.dumps({f"k{n}": n for n in range(number)})
    made = {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call_0_0", "content": "3"}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [made]}, answer]


TEXT = "x" * (CONTEXT * TOY.longest_token + 100)
PAIRS = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * CONTEXT
TOOLS = [
    {"type": "function", "function": {"name": f"t{n}", "parameters": {"properties": {f"p{k}": {} for k in range(100)}}}}
    for n in range(50)
]
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, Any]] = {
    "a call with many arguments": ("/v1/chat/completions", {"model": "policy", "messages": call(CONTEXT)}),
    "many tools": ("/v1/chat/completions", {"model": "policy", "messages": HI, "tools": TOOLS}),
    "many messages": ("/v1/chat/completions", {"model": "policy", "messages": [*PAIRS, *HI]}),
    "long text": ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": TEXT}]}),
    "many containers": ("/v1/chat/completions", {"model": "policy", "messages": HI, "metadata": [[]] * 100_000}),
    "messages": ("/v1/messages", {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": TEXT}]}),
    "count_tokens": ("/v1/messages/count_tokens", {"model": "policy", "messages": [{"role": "user", "content": TEXT}]}),
    "responses": ("/v1/responses", {"model": "policy", "input": TEXT}),
    "gemini": (GEMINI, {"contents": [{"role": "user", "parts": [{"text": TEXT}]}]}),
    "gemini counts": (GEMINI.replace("generate", "count").replace("Content", "Tokens"), {"contents": [[]] * 100_000}),
}
WORDS = ("maximum context length", "prompt is too long", "context window", "input token count")


def opened(renderer: Any) -> RecordedSession:
    recorder = Recorder(ScriptedEngine(()), renderer, max_context=CONTEXT)
    return recorder.open(toy_task(), rollout_id="rl/0/0", seed=7)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_no_prompt_has_is_refused_unrendered_as_too_long(name: str) -> None:
    path, body = BODIES[name]

    async def main() -> None:
        renderer = Unrendered()
        session = opened(renderer)
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            answer = await client.post(path, json=body, headers={"x-api-key": door.key})
        assert answer.status_code == 400 and any(words in answer.text for words in WORDS), answer.text
        assert renderer.renders == 0
        assert "count" in path or session.limit is not None and session.limit.reason == "context_length"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/mcp", "/v1/messages", "/v1/rewards", "/v1/rollouts/claim"])
def test_the_key_is_looked_at_before_the_body(path: str) -> None:
    """The answer comes while the body is still to be sent."""

    async def main() -> bytes:
        async with open_door(opened(TOY)) as door:
            place = httpx.URL(door.url)
            reader, writer = await asyncio.open_connection(place.host, place.port)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: wrong\r\nContent-Length: 900\r\n\r\n".encode())
            line = await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            return line

    status = asyncio.run(main()).split()[1]
    assert status in (b"401", b"403")


def test_a_body_that_says_that_it_is_too_large_is_not_read() -> None:
    async def main() -> bytes:
        async with open_door(opened(TOY)) as door:
            place = httpx.URL(door.url)
            reader, writer = await asyncio.open_connection(place.host, place.port)
            head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {door.key}\r\nContent-Length: {MOST_BYTES + 1}"
            writer.write(f"{head}\r\n\r\n".encode())
            line = await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            return line

    assert asyncio.run(main()).split()[1] == b"400"


@pytest.mark.parametrize("body", [{"name": "add", "arguments": {"a": [[]] * 20_000}}, {"x": "y" * 200_000}])
def test_a_call_that_no_reply_could_hold_is_refused(body: Any) -> None:
    async def main() -> httpx.Response:
        async with open_door(opened(TOY)) as door, httpx.AsyncClient(base_url=door.url) as client:
            sent = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": body}
            return await client.post("/mcp", json=sent, headers={"x-api-key": door.key})

    answer = asyncio.run(main())
    assert answer.status_code == 400 and answer.text.startswith("body: expected")


@pytest.mark.parametrize("value", [[], [1, 2, 3], {"a": {"b": [1]}}, ["a,b", '"[,{', "\\", '\\"'], [[]] * 50])
def test_values_are_counted_without_what_stands_in_text(value: Any) -> None:
    data = json.dumps(value).encode()
    number = sum(data.decode().count(mark) for mark in ",[{:")
    inside = sum(text.count(mark) for text in value if isinstance(text, str) for mark in ",[{:") if value else 0
    assert has_more(data, number - inside - 1) and not has_more(data, number - inside)


class Uncounted(bytes):
    """Body in which nothing is looked for."""

    def translate(self, *arguments: Any) -> bytes:
        raise AssertionError("it was counted")


def test_of_a_short_body_only_the_length_is_looked_at() -> None:
    """Counting costs an ordinary request more than decoding it."""
    data = Uncounted(b'{"messages": []}'.ljust(MUCH_VALUES))
    assert values_at_most(data) == len(data) and not has_more(data, Room(context=MUCH_VALUES, bytes=1).values)
    with pytest.raises(AssertionError):
        values_at_most(Uncounted(data + b" "))


def test_text_of_commas_is_not_taken_for_values() -> None:
    room = Room(context=1000, bytes=10_000_000)
    room.check(json.dumps({"messages": [{"role": "user", "content": "," * 500_000}]}).encode())
