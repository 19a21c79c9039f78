"""Published clients of MCP against the world's tools of a gateway, with the session's id and without one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents import PROGRAMS, RENDERER

from sparring.gateway.server import open_door
from sparring.record.recorder import Recorder
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_task
from sparring.types import ToolCall, ToolSpec

pytestmark = pytest.mark.harness
ADD = ToolSpec(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)
BEGIN = """
import asyncio, json, sys

url, key, session = sys.argv[1:]
headers = {"Authorization": "Bearer " + key}


def found(tools, *answers):
    print(json.dumps([[tool.name for tool in tools], *[answer.content[0].text for answer in answers]]))


async def without_id(response):
    if session == "none":
        response.headers.pop("mcp-session-id", None)
"""
MCP = """
import httpx2
from mcp import Client, ClientSession
from mcp.client.streamable_http import streamable_http_client


def streams(http):
    return streamable_http_client(url + "/mcp", http_client=http)


def http():
    return httpx2.AsyncClient(headers=headers, event_hooks={"response": [without_id]})
"""
PARTS = {
    "mcp, ClientSession": f"""{BEGIN}{MCP}
async def main():
    async with http() as client, streams(client) as (reads, writes, *_), ClientSession(reads, writes) as world:
        await world.initialize()
        await world.send_ping()
        tools = (await world.list_tools()).tools
        found(tools, await world.call_tool("add", dict(a=40, b=2)), await world.call_tool("add", dict(a=40, b=2)))


asyncio.run(main())
""",
    "mcp, Client": f"""{BEGIN}{MCP}
async def main():
    async with http() as client, Client(streams(client)) as world:
        tools = (await world.list_tools()).tools
        found(tools, await world.call_tool("add", dict(a=40, b=2)), await world.call_tool("add", dict(a=40, b=2)))


asyncio.run(main())
""",
    "fastmcp": f"""{BEGIN}
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport
from mcp.shared._httpx_utils import create_mcp_http_client


def made(**settings):
    client = create_mcp_http_client(**{{name: settings.get(name) for name in ("headers", "timeout", "auth")}})
    client.event_hooks["response"].append(without_id)
    return client


async def main():
    async with Client(StreamableHttpTransport(url + "/mcp", headers=headers, httpx_client_factory=made)) as world:
        tools = await world.list_tools()
        found(tools, await world.call_tool("add", dict(a=40, b=2)), await world.call_tool("add", dict(a=40, b=2)))


asyncio.run(main())
""",
}


class Counting:
    """Adds, and counts its calls; implements `protocols.ToolHost`."""

    tools: tuple[ToolSpec, ...] = (ADD,)

    def __init__(self) -> None:
        self.calls = 0

    async def call(self, call: ToolCall) -> str:
        self.calls += 1
        return f"{sum((call.arguments or {}).values())} in call {self.calls}"


def played(source: str, session: str) -> tuple[Any, list[bool]]:
    """What a client found, and of each call that has run whether its session had an id."""

    async def main() -> tuple[Any, list[bool]]:
        host = Counting()
        recorder = Recorder(ScriptedEngine(lambda request: ()), RENDERER, max_context=3000)
        of = recorder.open(toy_task(), rollout_id="rl/0/0", seed=1, role="policy")
        async with open_door(of) as door:
            door.tools = host
            python = PROGRAMS / "venv/bin/python"
            words = [str(python), "-I", "-c", source, door.url, door.key, session]
            pipe = asyncio.subprocess.PIPE
            client = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
            out, error = await client.communicate()
            calls = [call.sent_as is not None for call in door.calls._latest]
        assert client.returncode == 0 and host.calls == len(calls), error.decode()
        return json.loads(out), calls

    return asyncio.run(main())


@pytest.mark.parametrize("session", ["given", "none"])
@pytest.mark.parametrize("client", PARTS)
def test_a_client_lists_the_tools_and_each_of_its_calls_runs_once(client: str, session: str) -> None:
    found, calls = played(PARTS[client], session)
    assert found == [["add"], "42 in call 1", "42 in call 2"]
    assert calls == [session == "given"] * 2
