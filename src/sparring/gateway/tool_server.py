"""MCP server for the tools of a world, by streamable HTTP with one JSON object per response (specification of
2025-06-18).

The server implements `initialize`, `ping`, `tools/list` and `tools/call`. There is no event stream, since the server
sends no requests of its own. Session ids are only used to recognise a repeated request by its id.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sparring.errors import BadInput, PolicyFailure, SparringError
from sparring.gateway.client_protocol import WHEN_BROKEN
from sparring.gateway.connection import while_connected
from sparring.gateway.dialects.fields import body_of
from sparring.gateway.refusals import json_response
from sparring.protocols import ToolHost
from sparring.types import ToolCall, ToolSpec

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol versions in which these methods are equal. A client that offers another version gets the second version."""

NO_METHOD, BAD_PARAMETERS, FAILED = -32601, -32602, -32603

SESSION = "mcp-session-id"
"""Header with a client's session id."""

RETAINED = 64
"""Maximum number of calls of a session that are kept, in case a client repeats its request."""


class RunningCall:
    """One call of a tool, which runs once even if the client's connection breaks.

    Args:
        wanted: name and arguments as JSON with sorted keys.
        sent_as: session id and request id; None for a client without a session.
        running: task of the call; its result is the content of the response.

    Attributes:
        begun_before: number of calls of the endpoint that had started when this call's connection broke.
    """

    def __init__(
        self, calls: ToolCalls, wanted: str, sent_as: tuple[str, str] | None, running: asyncio.Task[dict[str, Any]]
    ) -> None:
        self.wanted, self.sent_as, self.running = wanted, sent_as, running
        self.begun_before = 0
        self._calls = calls

    async def content(self) -> dict[str, Any]:
        """Wait for the content of the response."""
        await asyncio.wait((self.running,))
        if self.running.cancelled():
            return {"error": {"code": FAILED, "message": "the rollout is over"}}
        return self.running.result()

    def deliver(self, delivered: bool | None) -> None:
        """Record whether the connection delivered the complete response. If not, or if unknown (None), an equal call
        joins this call."""
        if not delivered:
            self._calls.broke(self)


class ToolCalls:
    """Tool calls of the client of one session's endpoint.

    A call whose connection broke is joined by the next equal call. Equal calls have the same name and arguments. In
    addition, either session and request id are the same, or no other call has started since the connection broke:
    another call may have changed the world, and then the client wants a new answer. Two open connections are always two
    calls.
    """

    def __init__(self) -> None:
        self._broken: deque[RunningCall] = deque(maxlen=RETAINED)
        self._latest: deque[RunningCall] = deque(maxlen=RETAINED)
        self._under_way: set[asyncio.Task[dict[str, Any]]] = set()
        self._num_begun = 0

    def begin(
        self, host: ToolHost, name: str, arguments: dict[str, Any], sent_as: tuple[str, str] | None
    ) -> RunningCall:
        """Return the call of a request: the broken call that it repeats, or a new call, which starts to run.

        Args:
            sent_as: session id and request id; None for a client without a session.
        """
        wanted = json.dumps([name, arguments], sort_keys=True)
        equal = [call for call in self._broken if call.wanted == wanted]
        again = [call for call in equal if sent_as is not None and call.sent_as == sent_as]
        again += [call for call in equal if call.begun_before == self._num_begun]
        if again:
            self._broken.remove(again[0])
            return again[0]
        raw = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        running = asyncio.create_task(_call_tool(host, ToolCall(id="", name=name, arguments=arguments, raw=raw)))
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        self._num_begun += 1
        call = RunningCall(self, wanted, sent_as, running)
        self._latest.append(call)
        return call

    def broke(self, call: RunningCall) -> None:
        """Keep a call whose connection broke."""
        if call not in self._broken:
            call.begun_before = self._num_begun
            self._broken.append(call)

    async def end(self, *, drop: bool) -> None:
        """Wait for the running calls, or cancel them."""
        under_way = tuple(self._under_way)
        for running in under_way if drop else ():
            running.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class CallResponse(Response):
    """Response to a tool call, sent when the call is done."""

    def __init__(self, call: RunningCall, id: Any) -> None:
        self._call, self._id = call, id
        self._sent = self._has_left = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response unless the client leaves."""
        scope[WHEN_BROKEN] = self._when_broken
        try:
            content = await while_connected(receive, asyncio.ensure_future(self._call.content()))
        except ClientDisconnect:
            self._deliver(False)
            return
        body = msgspec.json.encode({"jsonrpc": "2.0", "id": self._id, **content})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self._sent = True
        self._deliver(True)

    def _when_broken(self) -> None:
        """Record that the client left: before the end of the response, or after that, when delivery is unknown."""
        self._deliver(None if self._sent else False)
        self._has_left = True

    def _deliver(self, delivered: bool | None) -> None:
        if not self._has_left:  # an equal request may have joined the call by now
            self._call.deliver(delivered)


async def answer_tools(host: ToolHost | None, calls: ToolCalls, request: Request, data: bytes) -> Response:
    """Answer a request to the MCP endpoint.

    Args:
        host: host of the tools; None if the world has no tools.
    """
    if host is None:
        return Response(status_code=404)
    if request.method != "POST":
        return Response(status_code=405, headers={"allow": "POST"})
    message = body_of(data)
    if "id" not in message or not message.keys().isdisjoint(("result", "error")):  # a notification, or an answer
        return Response(status_code=202)
    method, parameters = message.get("method"), message.get("params")
    parameters = parameters if isinstance(parameters, dict) else {}
    headers = {SESSION: secrets.token_hex(16)} if method == "initialize" else {}
    try:
        if method == "tools/call":
            session = request.headers.get(SESSION)
            sent_as = None if session is None else (session, json.dumps(message["id"]))
            return CallResponse(calls.begin(host, *_named_call(host, parameters), sent_as), message["id"])
        content = {"result": _result(host, method, parameters)}
    except _MethodError as error:
        content = {"error": {"code": error.code, "message": str(error)}}
    body = {"jsonrpc": "2.0", "id": message["id"], **content}
    return json_response(body, headers=headers)


class _MethodError(BadInput):
    """JSON-RPC error of a request."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def _result(host: ToolHost, method: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
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
        return {"tools": [_tool_entry(tool) for tool in host.tools]}
    raise _MethodError(NO_METHOD, f"method: expected initialize, ping, tools/list or tools/call, got {method!r}")


def _tool_entry(tool: ToolSpec) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _named_call(host: ToolHost, parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call.

    Raises:
        _MethodError: the tool is unknown, or the arguments are not an object.
    """
    name, arguments = parameters.get("name"), parameters.get("arguments")
    arguments = {} if arguments is None else arguments
    if name not in [tool.name for tool in host.tools]:
        raise _MethodError(BAD_PARAMETERS, f"name: expected a tool of tools/list, got {name!r}")
    if not isinstance(arguments, dict):
        raise _MethodError(BAD_PARAMETERS, f"arguments: expected an object, got {type(arguments).__name__}")
    return str(name), arguments


async def _call_tool(host: ToolHost, call: ToolCall) -> dict[str, Any]:
    """Call a tool and return the content of the response. A PolicyFailure is a result that the model reads."""
    try:
        text = await host.call(call)
    except PolicyFailure as error:
        return {"result": {"content": [{"type": "text", "text": f"error: {error}"}], "isError": True}}
    except SparringError as error:
        return {"error": {"code": FAILED, "message": str(error)}}
    return {"result": {"content": [{"type": "text", "text": text}], "isError": False}}
