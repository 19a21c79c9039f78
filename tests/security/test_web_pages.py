"""A web page of another site is answered by no server that asks for no key, and never by a world's tools."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from sparring.gateway.hosts import at_home, plainly
from sparring.gateway.server import open_door
from sparring.record.recorder import Recorder
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task

ELSEWHERE = "https://evil.example"
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


def status(scope: dict[str, Any], keyed: bool) -> int:
    """The status of a request to a server that listens at 127.0.0.1:8000 as `box.local`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "method": "GET", "path": "/v1/model", "server": ("127.0.0.1", 8000), **scope}
    application = at_home(Response("ok"), plainly, keyed=lambda scope: keyed, names=("Box.local",))
    asyncio.run(application(whole, None, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


HOSTS = {
    "127.0.0.1:8000": 200, "localhost:8000": 200, "LOCALHOST": 200, "a.localhost": 200, "[::1]:8000": 200,
    "box.local:8000": 200, "10.0.0.5:9000": 200, "evil.example": 403, "localhost.evil.example": 403,
    "127.0.0.1.evil.example:8000": 403, "": 403, "evil@evil.example": 403, "[::1": 403,
}  # fmt: skip
ORIGINS = {
    "http://127.0.0.1:3000": 200, "http://localhost": 200, "http://box.local:8000": 200, ELSEWHERE: 403, "null": 403,
    "": 403, "http://203.0.113.9": 403, "http://127.0.0.1.evil.example": 403, "http://[::1": 403,
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_that_leads_here_is_no_address_of_the_server(host: str) -> None:
    scope = {"headers": [(b"host", host.encode())]}
    assert (status(scope, keyed=False), status(scope, keyed=True)) == (HOSTS[host], 200)


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_of_another_site_is_refused_unless_a_key_is_asked_for(origin: str) -> None:
    scope = {"headers": [(b"host", b"127.0.0.1:8000"), (b"origin", origin.encode())]}
    assert (status(scope, keyed=False), status(scope, keyed=True)) == (ORIGINS[origin], 200)
    assert status({**scope, "path": "/mcp"}, keyed=True) == ORIGINS[origin], "MCP wants it under any key"


def test_a_socket_in_the_file_system_is_no_pages() -> None:
    assert status({"headers": [(b"host", b"run")], "server": ("/run/gateway.sock", None)}, keyed=False) == 200


def test_the_gateways_endpoints_know_their_own() -> None:
    async def main() -> dict[str, int]:
        session = Recorder(ScriptedEngine(()), toy_renderer(), max_context=1000).open(
            toy_task(), rollout_id="r", seed=1
        )
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            key, page = {"x-api-key": door.key}, {"origin": ELSEWHERE}
            asked = {
                "a program": await client.get("/v1/models", headers=key),
                "a program by another name": await client.get("/v1/models", headers={**key, "host": "gateway.example"}),
                "a page with a key": await client.get("/v1/models", headers={**key, **page}),
                "a page": await client.get("/v1/models", headers=page),
                "a page that asks for health": await client.get("/health", headers=page),
                "a name": await client.get("/openapi.json", headers={"host": "evil.example"}),
                "a page that rewards": await client.post("/v1/rewards", content=b"{}", headers=page),
                "a page that claims": await client.post("/v1/rollouts/claim", content=b"{}", headers=page),
                "a page with a key at the tools": await client.post("/mcp", json=LIST, headers={**key, **page}),
                "a program at the tools": await client.post("/mcp", json=LIST, headers=key),
            }
        return {name: answer.status_code for name, answer in asked.items()}

    assert asyncio.run(main()) == {
        "a program": 200, "a program by another name": 200, "a page with a key": 200, "a page": 403,
        "a page that asks for health": 403, "a name": 403, "a page that rewards": 403, "a page that claims": 403,
        "a page with a key at the tools": 403, "a program at the tools": 404,
    }  # fmt: skip
