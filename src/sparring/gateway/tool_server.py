"""A world's tools as an MCP server: streamable HTTP, each answer one JSON object (specification of 2025-06-18).

Of the protocol there is what calling tools needs: `initialize`, `ping`, `tools/list` and `tools/call`. There is no
session and no event stream: nothing is sent that was not asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from sparring.errors import BadInput, SparringError
from sparring.gateway.dialects.dialect import body_of
from sparring.protocols import ToolHost
from sparring.types import ToolCall, ToolSpec

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol in which these methods are the same; a client that offers another is answered with the
second."""

NO_METHOD, BAD_PARAMETERS, FAILED = -32601, -32602, -32603


async def answer_tools(host: ToolHost | None, method: str, data: bytes) -> Response:
    """Answer a request to the endpoint.

    Args:
        host: has the tools; None where the world has none.
        method: of HTTP.
        data: the body.

    Raises:
        BadInput: the body is no JSON object.
    """
    if host is None:
        return Response(status_code=404)
    if method != "POST":
        return Response(status_code=405, headers={"allow": "POST"})
    message = body_of(data)
    if "id" not in message:  # a notification
        return Response(status_code=202)
    try:
        content = {"result": await _result(host, message.get("method"), message.get("params") or {})}
    except _Refused as error:
        content = {"error": {"code": error.code, "message": str(error)}}
    except SparringError as error:
        content = {"error": {"code": FAILED, "message": str(error)}}
    body = {"jsonrpc": "2.0", "id": message["id"], **content}
    return Response(msgspec.json.encode(body), media_type="application/json")


class _Refused(BadInput):
    """A call of a method that cannot be answered."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def _result(host: ToolHost, method: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        wanted = parameters.get("protocolVersion")
        return {
            "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[1],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "world", "version": "1"},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": [_listed(tool) for tool in host.tools]}
    if method == "tools/call":
        return await _called(host, parameters)
    raise _Refused(NO_METHOD, f"method: expected initialize, ping, tools/list or tools/call, got {method!r}")


def _listed(tool: ToolSpec) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


async def _called(host: ToolHost, parameters: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = parameters.get("name"), parameters.get("arguments") or {}
    if name not in [tool.name for tool in host.tools]:
        raise _Refused(BAD_PARAMETERS, f"name: expected a tool of tools/list, got {name!r}")
    if not isinstance(arguments, dict):
        raise _Refused(BAD_PARAMETERS, f"arguments: expected an object, got {type(arguments).__name__}")
    raw = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    text = await host.call(ToolCall(id="", name=str(name), arguments=arguments, raw=raw))
    return {"content": [{"type": "text", "text": text}], "isError": False}
