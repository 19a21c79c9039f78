"""A world's tools as an MCP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest
from sessions import SPEC, opened, said, says

from sparring.gateway.server import Door, open_door
from sparring.types import ToolCall, ToolSpec

T = TypeVar("T")


class Adding:
    """Adds; implements `protocols.ToolHost`."""

    tools: tuple[ToolSpec, ...] = (SPEC,)

    async def call(self, call: ToolCall) -> str:
        return str(sum((call.arguments or {}).values()))


def asked(*bodies: Any, tools: bool = True, key: str | None = None, method: str = "POST") -> list[httpx.Response]:
    """The answers to these requests."""

    async def main() -> list[httpx.Response]:
        async with open_door(opened(says(said("A")))) as door, httpx.AsyncClient(base_url=door.url) as client:
            door.tools = Adding() if tools else None
            headers = {"Authorization": f"Bearer {door.key if key is None else key}"}
            return [
                await client.request(method, "/mcp", content=body, headers=headers)
                if isinstance(body, bytes)
                else await client.request(method, "/mcp", json=body, headers=headers)
                for body in bodies
            ]

    return asyncio.run(main())


def request(method: str, **parameters: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": parameters}


def test_a_client_initialises_lists_the_tools_and_calls_one() -> None:
    begun, noted, listed, called = asked(
        request("initialize", protocolVersion="2025-03-26", capabilities={}),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        request("tools/list"),
        request("tools/call", name="add", arguments={"a": 40, "b": 2}),
    )
    assert begun.json()["result"]["protocolVersion"] == "2025-03-26"
    assert (noted.status_code, noted.content) == (202, b"")
    assert [tool["name"] for tool in listed.json()["result"]["tools"]] == ["add"]
    content = {"content": [{"type": "text", "text": "42"}], "isError": False}
    assert called.json() == {"jsonrpc": "2.0", "id": 7, "result": content}


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (request("tools/call", name="subtract"), -32602, "expected a tool"),
        (request("tools/call", name="add", arguments=[1]), -32602, "arguments: expected an object"),
        (request("tools/call", name="add", arguments=[]), -32602, "arguments: expected an object"),
        (request("resources/list"), -32601, "got 'resources/list'"),
        (request("initialize", protocolVersion="1999-01-01"), None, "2025-06-18"),
    ],
)
def test_invalid_requests_get_an_error_of_the_protocol(body: Any, code: int | None, text: str) -> None:
    (answer,) = asked(body)
    assert answer.status_code == 200 and text in answer.text
    assert answer.json().get("error", {}).get("code") == code


def test_the_tools_need_the_key() -> None:
    assert asked(request("tools/list"), key="sk-other")[0].status_code == 401
    assert asked(request("tools/list"), tools=False)[0].status_code == 404
    assert asked(b"{", method="POST")[0].status_code == 400
    assert asked({"jsonrpc": "2.0", "id": 7, "result": {}})[0].status_code == 202, "an answer asks for none"
    huge = json.dumps(request("tools/call", name="add", arguments={"a": 7777})).replace("7777", "1e999")
    assert asked(huge.encode())[0].status_code == 400
    assert asked(b"", method="GET")[0].status_code == 405


class Counting:
    """Counts its calls, each of which waits for a word; implements `protocols.ToolHost`.

    Attributes:
        begun: calls that have begun.
        goes_on: lets those go on that wait.
    """

    tools: tuple[ToolSpec, ...] = (SPEC,)

    def __init__(self) -> None:
        self.begun = 0
        self.goes_on = asyncio.Event()

    async def call(self, call: ToolCall) -> str:
        self.begun += 1
        number = self.begun
        await self.goes_on.wait()
        return f"call {number}"


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go on until a condition holds."""
    while not condition():
        await asyncio.sleep(0)


def wanted(id: Any = 7, **arguments: Any) -> dict[str, Any]:
    return {**request("tools/call", name="add", arguments=arguments or {"a": 1, "b": 2}), "id": id}


class Client:
    """Client of a door's tools, over sockets of its own."""

    def __init__(self, door: Door, host: Counting, session: str = "") -> None:
        self._door, self._host = door, host
        self._headers = {"Mcp-Session-Id": session} if session else {}
        self._client = httpx.AsyncClient(base_url=door.url, headers={"x-api-key": door.key}, timeout=60)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.aclose()

    async def breaks(self, body: Any, noted: bool = True) -> None:
        """Send a request and break its connection when the tool runs; `noted`: and wait until the server knows."""
        place = httpx.URL(self._door.url)
        _reader, writer = await asyncio.open_connection(place.host, place.port)
        data = json.dumps(body).encode()
        headers = {"Host": "here", "x-api-key": self._door.key, "Content-Length": len(data), **self._headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        begun, broken = self._host.begun, len(self._door.calls._broken)
        writer.write(f"POST /mcp HTTP/1.1\r\n{lines}\r\n".encode() + data)
        await until(lambda: self._host.begun > begun)
        writer.transport.abort()
        await until(lambda: not noted or len(self._door.calls._broken) > broken)

    async def calls(self, body: Any) -> str:
        """Return what a call is answered with, under the id of its own request."""
        answer = await self._client.post("/mcp", json=body, headers=self._headers)
        assert answer.status_code == 200 and answer.json()["id"] == body["id"], answer.text
        return answer.json()["result"]["content"][0]["text"]


def talked(talk: Callable[[Client, Counting], Awaitable[T]], session: str = "") -> tuple[T, int]:
    """What came of a client's talk with a world's tools, and how many calls ran."""

    async def main() -> tuple[T, int]:
        host = Counting()
        async with open_door(opened(says(said("A")))) as door, Client(door, host, session) as client:
            door.tools = host
            return await talk(client, host), host.begun

    return asyncio.run(main())


@pytest.mark.parametrize("id", [7, "renewed"])
@pytest.mark.parametrize("noted", [True, False])
def test_an_equal_call_joins_one_whose_connection_broke(id: Any, noted: bool) -> None:
    async def talk(client: Client, host: Counting) -> list[str]:
        await client.breaks(wanted(), noted)
        again = asyncio.create_task(client.calls(wanted(id, b=2, a=1)))
        while_it_runs = asyncio.create_task(client.calls(wanted()))  # an open connection beside it: another call
        await until(lambda: host.begun == 2)
        host.goes_on.set()
        return [*await asyncio.gather(again, while_it_runs), await client.calls(wanted())]

    answers, begun = talked(talk)
    assert (sorted(answers[:2]), answers[2], begun) == (["call 1", "call 2"], "call 3", 3)


def test_a_call_that_ended_without_a_connection_is_answered_once() -> None:
    async def talk(client: Client, host: Counting) -> list[str]:
        await client.breaks(wanted())
        host.goes_on.set()
        return [await client.calls(wanted()) for _ in range(2)]

    assert talked(talk) == (["call 1", "call 2"], 2)


@pytest.mark.parametrize(("session", "third"), [("", "call 3"), ("s-1", "call 1")])
def test_after_another_call_only_the_same_request_joins(session: str, third: str) -> None:
    """A client that has changed the world since may ask anew; the request itself, of its session, is the same."""

    async def talk(client: Client, host: Counting) -> list[str]:
        await client.breaks(wanted())
        host.goes_on.set()
        return [await client.calls(wanted(8, a=5)), await client.calls(wanted()), await client.calls(wanted(9))]

    (second, again, fourth), begun = talked(talk, session)
    assert (second, again, fourth) == ("call 2", third, f"call {begun}")


def test_two_broken_calls_each_get_their_own_answer() -> None:
    async def talk(client: Client, host: Counting) -> list[str]:
        await client.breaks(wanted(7))
        waiting = asyncio.create_task(client.calls(wanted(9, a=3)))
        await until(lambda: host.begun == 2)
        await client.breaks(wanted(8, a=4))
        host.goes_on.set()
        await waiting
        return [await client.calls(wanted(8, a=4)), await client.calls(wanted(7))]

    assert talked(talk, "s-1") == (["call 3", "call 1"], 3)


def test_the_end_of_a_rollout_waits_for_running_calls() -> None:
    async def main() -> int:
        host = Counting()
        async with open_door(opened(says(said("A")))) as door, Client(door, host) as client:
            door.tools = host
            await client.breaks(wanted())
            asyncio.get_running_loop().call_soon(host.goes_on.set)
        return len(door.calls._under_way)

    assert asyncio.run(main()) == 0


def test_initialising_returns_a_session_id() -> None:
    begun, listed = asked(request("initialize", protocolVersion="2025-06-18"), request("tools/list"))
    assert len(begun.headers["mcp-session-id"]) == 32 and "mcp-session-id" not in listed.headers
