"""A world's tools as an MCP server: streamable HTTP, each answer one JSON object (specification of 2025-06-18).

Of the protocol there is what calling tools needs: `initialize`, `ping`, `tools/list` and `tools/call`. There is no
event stream: nothing is sent that was not asked for. A session's id says whether two requests with one id are the same.
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
from sparring.gateway.connection import while_there
from sparring.gateway.dialects.dialect import body_of
from sparring.gateway.serving import WHEN_BROKEN
from sparring.protocols import ToolHost
from sparring.types import ToolCall, ToolSpec

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol in which these methods are the same; a client that offers another is answered with the
second."""

NO_METHOD, BAD_PARAMETERS, FAILED = -32601, -32602, -32603

SESSION = "mcp-session-id"
"""Header of a client's session."""

RETAINED = 64
"""Calls of one door that are remembered in case their connection breaks."""


class RunningCall:
    """One call of a tool, which runs once, however often connections break.

    Args:
        calls: of the door.
        wanted: name and arguments, in one form.
        sent_as: the session and the id of its request; None where the client has no session.
        running: the call; its result is the content of the answer.

    Attributes:
        begun_before: number of calls of the door that had begun when its connection broke.
    """

    def __init__(
        self, calls: ToolCalls, wanted: str, sent_as: tuple[str, str] | None, running: asyncio.Task[dict[str, Any]]
    ) -> None:
        self.wanted, self.sent_as, self.running = wanted, sent_as, running
        self.begun_before = 0
        self._calls = calls

    async def content(self) -> dict[str, Any]:
        """Return the content of the answer when it is there."""
        await asyncio.wait((self.running,))
        if self.running.cancelled():
            return {"error": {"code": FAILED, "message": "the rollout is over"}}
        return self.running.result()

    def deliver(self, delivered: bool | None) -> None:
        """Take note of whether the connection that reads the answer got it to its end. Where it did not, or nobody
        knows (None), an equal call is this one."""
        if not delivered:
            self._calls.broke(self)


class ToolCalls:
    """Calls of a world's tools by the client of one door. One whose connection broke before its answer was whole is
    there for the equal call that follows, which joins it or gets its answer. Equal are the name and the arguments; and
    the session and the request's id, or no other call has begun since it broke: a client may have changed the world
    then, and ask anew. Two open connections are two calls.
    """

    def __init__(self) -> None:
        self._broken: deque[RunningCall] = deque(maxlen=RETAINED)
        self._latest: deque[RunningCall] = deque(maxlen=RETAINED)
        self._under_way: set[asyncio.Task[dict[str, Any]]] = set()
        self._num_begun = 0

    def begin(
        self, host: ToolHost, name: str, arguments: dict[str, Any], sent_as: tuple[str, str] | None
    ) -> RunningCall:
        """Return the call that a request wants: one that broke, or a new one, which runs from now on.

        Args:
            host: has the tools.
            name: of the tool.
            arguments: of the call.
            sent_as: the session and the id of the request; None where the client has no session.
        """
        wanted = json.dumps([name, arguments], sort_keys=True)
        equal = [call for call in self._broken if call.wanted == wanted]
        again = [call for call in equal if sent_as is not None and call.sent_as == sent_as]
        again += [call for call in equal if call.begun_before == self._num_begun]
        if again:
            self._broken.remove(again[0])
            return again[0]
        raw = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        running = asyncio.create_task(_content(host, ToolCall(id="", name=name, arguments=arguments, raw=raw)))
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        self._num_begun += 1
        call = RunningCall(self, wanted, sent_as, running)
        self._latest.append(call)
        return call

    def broke(self, call: RunningCall) -> None:
        """Remember a call whose connection broke."""
        if call not in self._broken:
            call.begun_before = self._num_begun
            self._broken.append(call)

    async def end(self, *, drop: bool) -> None:
        """Wait for the calls that run, or drop them."""
        under_way = tuple(self._under_way)
        for running in under_way if drop else ():
            running.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


class CallResponse(Response):
    """Answer to one request for a call, sent when it is there.

    Args:
        call: that is wanted.
        id: of the request.
    """

    def __init__(self, call: RunningCall, id: Any) -> None:
        self._call, self._id = call, id
        self._sent = self._has_left = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client leaves."""
        scope[WHEN_BROKEN] = self._when_broken
        try:
            content = await while_there(receive, asyncio.ensure_future(self._call.content()))
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
        """Take note that the client has left: whether it read an answer that was sent to its end, nobody knows."""
        self._deliver(None if self._sent else False)
        self._has_left = True

    def _deliver(self, delivered: bool | None) -> None:
        if not self._has_left:  # the call may be an equal one's by now
            self._call.deliver(delivered)


async def answer_tools(host: ToolHost | None, calls: ToolCalls, request: Request, data: bytes) -> Response:
    """Answer a request to the endpoint.

    Args:
        host: has the tools; None where the world has none.
        calls: of the door.
        request: of the client.
        data: its body.

    Raises:
        BadInput: the body is no JSON object.
    """
    if host is None:
        return Response(status_code=404)
    if request.method != "POST":
        return Response(status_code=405, headers={"allow": "POST"})
    message = body_of(data)
    if "id" not in message:  # a notification
        return Response(status_code=202)
    method, parameters = message.get("method"), message.get("params")
    parameters = parameters if isinstance(parameters, dict) else {}
    headers = {SESSION: secrets.token_hex(16)} if method == "initialize" else {}
    try:
        if method == "tools/call":
            session = request.headers.get(SESSION)
            sent_as = None if session is None else (session, json.dumps(message["id"]))
            return CallResponse(calls.begin(host, *_wanted(host, parameters), sent_as), message["id"])
        content = {"result": _result(host, method, parameters)}
    except _Refused as error:
        content = {"error": {"code": error.code, "message": str(error)}}
    body = {"jsonrpc": "2.0", "id": message["id"], **content}
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)


class _Refused(BadInput):
    """A call of a method that cannot be answered."""

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
        return {"tools": [_listed(tool) for tool in host.tools]}
    raise _Refused(NO_METHOD, f"method: expected initialize, ping, tools/list or tools/call, got {method!r}")


def _listed(tool: ToolSpec) -> dict[str, Any]:
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "inputSchema": schema}


def _wanted(host: ToolHost, parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call.

    Raises:
        _Refused: there is no such tool, or these are no arguments.
    """
    name, arguments = parameters.get("name"), parameters.get("arguments") or {}
    if name not in [tool.name for tool in host.tools]:
        raise _Refused(BAD_PARAMETERS, f"name: expected a tool of tools/list, got {name!r}")
    if not isinstance(arguments, dict):
        raise _Refused(BAD_PARAMETERS, f"arguments: expected an object, got {type(arguments).__name__}")
    return str(name), arguments


async def _content(host: ToolHost, call: ToolCall) -> dict[str, Any]:
    """Call a tool; return the content of the answer. What the policy's program did wrong is its model's to read."""
    try:
        text = await host.call(call)
    except PolicyFailure as error:
        return {"result": {"content": [{"type": "text", "text": f"error: {error}"}], "isError": True}}
    except SparringError as error:
        return {"error": {"code": FAILED, "message": str(error)}}
    return {"result": {"content": [{"type": "text", "text": text}], "isError": False}}
