"""A world's tools as an MCP server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from sessions import SPEC, opened, said, says

from sparring.gateway.server import open_door
from sparring.types import ToolCall, ToolSpec


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


def test_a_client_begins_lists_the_tools_and_calls_one() -> None:
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
        (request("tools/call", name="subtract"), -32602, "expected a tool of tools/list, got 'subtract'"),
        (request("tools/call", name="add", arguments=[1]), -32602, "arguments: expected an object, got list"),
        (request("resources/list"), -32601, "got 'resources/list'"),
        (request("initialize", protocolVersion="1999-01-01"), None, "2025-06-18"),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_the_protocol(body: Any, code: int | None, text: str) -> None:
    (answer,) = asked(body)
    assert answer.status_code == 200 and text in answer.text
    assert answer.json().get("error", {}).get("code") == code


def test_the_key_opens_the_tools_and_nothing_else_does() -> None:
    assert asked(request("tools/list"), key="sk-other")[0].status_code == 401
    assert asked(request("tools/list"), tools=False)[0].status_code == 404
    assert asked(b"{", method="POST")[0].status_code == 400
    assert asked(b"", method="GET")[0].status_code == 405
