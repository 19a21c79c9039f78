"""Text of any kind in every header, parameter, path and host that a server reads: each request is answered, or refused
in its vendor's form; none is a fault of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from sparring.gateway.dialects.evidence import AGENTS, CLASS, PARENTS
from sparring.gateway.server import Gateway
from sparring.harness.world_tools import SampledCalls, WorldTools
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, Observation, ToolSpec

RENDERER = toy_renderer()
USER = [{"role": "user", "content": "Hi"}]
POSTS = {
    "/v1/chat/completions": {"model": "policy", "messages": USER},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": USER},
    "/v1/messages/count_tokens": {"model": "policy", "messages": USER},
    "/v1/responses": {"model": "policy", "input": "Hi"},
    "/v1beta/models/policy:generateContent": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
    "/v1beta/models/policy:streamGenerateContent": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
    "/v1beta/models/policy:countTokens": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
    "/v1/rewards": {"reward": 1.0},
    "/v1/rollouts/claim": {},
    "/v1/rollouts/x/renew": {},
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {}}},
}
GETS = ("/v1/models", "/v1beta/models", "/v1/models/policy", "/health", "/openapi.json", "/nowhere", "/mcp")
HEADERS = (
    *("host", "origin", "authorization", "x-api-key", "x-goog-api-key", "anthropic-version", "anthropic-beta"),
    *("openai-beta", "x-codex-turn-metadata", "x-openai-subagent", CLASS, *AGENTS, *PARENTS, "mcp-session-id"),
    *("content-type", "content-length", "accept", "cookie", "x-stainless-retry-count"),
)
PARAMETERS = ("key", "alt", "$alt", "pageSize")
ODD = (
    *(b"", b"\x00", b"\xed\xa0\x80", b"\xff\xfe", b"[::1", b"[", b"a@b:c", b"x:99999999", b"\xc2\xb2", b"-1"),
    *(b"[" * 60_000, b'{"a":' * 10_000, b'{"request_kind": "\\ud800"}', b"1e999", b"9" * 5000, b"x" * (1 << 20)),
    *("\u2100.example".encode(), b"null", b"http://[::1", b"Bearer", b"Basic \xff"),
)


class Asked(NamedTuple):
    """A request, and where the odd text stands in it."""

    method: str
    path: str
    place: str
    odd: bytes

    def head(self, key: str, length: int) -> bytes:
        """Its bytes up to the body."""
        path, headers = self.path, {"host": b"127.0.0.1", "x-api-key": key.encode(), "content-length": b"%d" % length}
        kind, _, name = self.place.partition(" ")
        escaped = b"".join(b"%%%02x" % byte for byte in self.odd) if len(self.odd) < 100 else self.odd
        escaped = self.odd if self.odd == b"\xff\xfe" else escaped
        target = path.encode()
        if kind == "header":
            headers[name] = self.odd
        elif kind == "parameter":
            target += b"?" + name.encode() + b"=" + escaped
        elif kind == "path":
            target = path.replace("policy", "\0").replace("/x/", "/\0/").encode().replace(b"\0", escaped)
            target = b"/k/" + escaped + target if name == "key" else target
        lines = [b"%s: %s" % (name.encode(), value) for name, value in headers.items()]
        first = self.method.encode() + b" " + target + b" HTTP/1.1"
        return b"\r\n".join((first, *lines, b"connection: close", b"", b""))


def all_requests() -> list[Asked]:
    paths = [("POST", path) for path in POSTS] + [("GET", path) for path in GETS]
    places = [f"header {name}" for name in HEADERS] + [f"parameter {name}" for name in PARAMETERS]
    places += ["path model", "path key"]
    return [Asked(*path, place, odd) for path in paths for place in places for odd in ODD]


class Adding:
    """A world with one tool."""

    roles = ("policy",)
    tools = (ToolSpec(name="add", description="", parameters={"type": "object", "properties": {}}),)

    async def step(self, reply: Message, role: str | None = None) -> Observation:
        return Observation(messages=(Message(role="tool", content="0"),), done=False)


async def send(port: int, head: bytes, body: bytes) -> bytes:
    """What comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + body)
        await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def with_gateway(talk: Callable[[int, str], Awaitable[Any]]) -> Any:
    engine = ScriptedEngine(lambda request: reply_tokens(RENDERER, Message(role="assistant", content="Done.")))
    limits = Limits(max_turns=10_000, max_tokens=10**7, max_tool_calls=10_000)
    session = Recorder(engine, RENDERER, max_context=3000).open(toy_task(), rollout_id="r", seed=1, limits=limits)
    gateway = Gateway()
    door = await gateway.open(session)
    door.tools = WorldTools(Adding(), SampledCalls(9))
    try:
        return await talk(int(door.url.rpartition(":")[2]), door.key)
    finally:
        await gateway.shut(door, drop=True)


def fault_of(asked: Asked, came: bytes) -> str:
    """What is wrong with an answer; empty where nothing is."""
    head, _, body = came.partition(b"\r\n\r\n")
    status = head.split(b" ")[1].decode() if head.startswith(b"HTTP/1.1 ") else "none"
    if status == "none":
        return "" if len(asked.odd) > 1 << 16 else "no answer"  # closed while it still sent
    if status[0] == "2" or b"text/plain" in head and status in ("400", "413", "431"):
        return ""  # what no endpoint has seen has no vendor
    if status[0] == "5":
        return f"{status} {body[:200]!r}"
    if asked.path == "/mcp" or status in ("405", "404") and not body:
        return ""
    try:
        return "" if "error" in json.loads(body) else f"{status} {body[:200]!r}"
    except ValueError:
        return f"{status} {body[:200]!r}"


def play(requests: list[Asked], caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    async def talk(port: int, key: str) -> dict[str, str]:
        faults = {}
        for asked in requests:
            body = json.dumps(POSTS.get(asked.path)).encode() if asked.method == "POST" else b""
            async with asyncio.timeout(20):
                came = await send(port, asked.head(key, len(body)), body)
            if fault := fault_of(asked, came):
                faults[f"{asked.method} {asked.path} {asked.place} {asked.odd[:30]!r}"] = fault
        return faults

    with caplog.at_level(logging.ERROR):
        faults = asyncio.run(with_gateway(talk))
    return faults | {
        f"log {n}": record.getMessage()[:200] for n, record in enumerate(caplog.records) if record.exc_info
    }


FOUND = (
    Asked("POST", "/v1/messages", "header x-codex-turn-metadata", b"[" * 60_000),
    Asked("POST", "/v1/responses", "header x-stainless-retry-count", b"9" * 5000),
    Asked("GET", "/v1/models", "header host", b"["),
    Asked("POST", "/mcp", "header mcp-session-id", b"\xff"),
    Asked("POST", "/v1beta/models/policy:generateContent", "path model", b"\x00\xed\xa0\x80"),
    Asked("POST", "/v1/chat/completions", "path key", b"x" * (1 << 20)),
)


def test_odd_text_is_answered_in_the_vendors_form(caplog: pytest.LogCaptureFixture) -> None:
    assert play(list(FOUND), caplog) == {}


def test_parameters_of_a_tool_call_of_any_kind() -> None:
    async def talk(port: int, key: str) -> None:
        for parameters in ([1], "x", 3, {"name": ["add"]}, {"name": "add", "arguments": [1]}):
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": parameters}
            body = json.dumps(call).encode()
            came = await send(port, Asked("POST", "/mcp", "", b"").head(key, len(body)), body)
            assert came.startswith(b"HTTP/1.1 200") and b'"error":{"code":-32602' in came

    asyncio.run(with_gateway(talk))


@pytest.mark.slow
def test_requests_drawn_with_a_seed(caplog: pytest.LogCaptureFixture) -> None:
    assert play(random.Random(11).sample(all_requests(), 2000), caplog) == {}
