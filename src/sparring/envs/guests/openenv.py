"""Worlds of OpenEnv servers (https://github.com/meta-pytorch/OpenEnv), over their WebSocket: a session for each
rollout. Their HTTP is not used, since each of its steps makes a new world."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, EnvError, boundary, refusal
from sparring.types import DEFAULT_ROLES

METADATA = "metadata"
"""Field of every action, which no policy fills."""


class OpenEnvServer:
    """Server of worlds. It has the methods of `Guests`.

    Args:
        url: address, such as `ws://127.0.0.1:8000`.

    Raises:
        BadInput: the package websockets is missing, or no OpenEnv server answers.
    """

    constants: Mapping[str, Any] = {}
    functions: frozenset[str] = frozenset()

    def __init__(self, url: str) -> None:
        with boundary(BadInput, "env.guest.url", "the package websockets", "pip install 'sparring[openenv]'"):
            import websockets
        self._connect = websockets.connect
        self._url, self.name = url.rstrip("/"), f"OpenEnv server {url}"
        do = "start the server, and name its address as ws://HOST:PORT"
        with boundary(BadInput, "env.guest.url", f"an OpenEnv server at {url}", do):
            with urllib.request.urlopen(f"http{self._url.removeprefix('ws')}/schema", timeout=30) as answer:
                fields = json.load(answer)["action"]["properties"]
        texts = [name for name, field in fields.items() if field.get("type") == "string" and name != METADATA]
        self.text_field = texts[0] if len(texts) == 1 and len(set(fields) - {METADATA}) == 1 else None

    def roles_with(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the one role of such a world."""
        return DEFAULT_ROLES

    def ask(self, function: str, arguments: Mapping[str, Any]) -> Any:
        """Refuse what only an adapter can answer (`BadInput`)."""
        raise refusal("env.guest", f"an adapter with {function}", self.name, "name an adapter")

    async def take(self, number: int) -> OpenEnvSession:
        """Open a session. Raises EnvError if the server does not answer."""
        with boundary(EnvError, self.name):
            return OpenEnvSession(self, await self._connect(f"{self._url}/ws", max_size=1 << 24))


class OpenEnvSession:
    """Session of one rollout, over its WebSocket. It has the methods of a `Guest`."""

    def __init__(self, server: OpenEnvServer, socket: Any) -> None:
        self._server, self._socket = server, socket
        self._numbers = itertools.count(1)
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._settings: Mapping[str, Any] = {}  # what `reset` gets beside the seed

    async def call(self, method: str, number: int, arguments: Mapping[str, Any]) -> Any:
        """Return the answer to a call of the world.

        Raises:
            EnvError: the server refused it, or its session has ended.
        """
        match method:
            case "make":
                self._settings = arguments
                listed = await self._send("mcp", self._rpc("tools/list", {}))
                self._tools = listed.get("result", {}).get("tools", ())
                return ["tools"] if self._tools else []
            case "tools":
                return [_spec(tool) for tool in self._tools]
            case "call":
                answer = await self._send("mcp", self._rpc("tools/call", arguments))
                return _text_of(answer)
            case "step":
                try:
                    action = self._action(arguments["action"]["text"])
                except ValueError as error:
                    return {"observation": f"No action: {error}. Expected a JSON object.", "reward": 0.0}
                return await self._send("step", action)
            case _:
                return await self._send(method, {**self._settings, **arguments})

    async def leave(self, number: int) -> None:
        """Close the session."""
        await self._socket.close()

    def _action(self, text: str) -> Mapping[str, Any]:
        """Convert a reply to an action: its only field of text, or the fields of a JSON object."""
        if self._server.text_field is not None:
            return {self._server.text_field: text}
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError(f"got {text[:80]!r}")
        return action

    def _rpc(self, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": parameters}

    async def _send(self, kind: str, data: Mapping[str, Any]) -> Any:
        with boundary(EnvError, self._server.name):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        if answer["type"] != "error":
            return answer["data"]
        error, do = answer["data"], ""
        if error.get("code") == "CAPACITY_REACHED":
            do = "; start the server with more max_concurrent_envs, or lower rollout.max_concurrent_rollouts"
        raise EnvError(f"{self._server.name}: {error.get('code')}: {error.get('message')}{do}")


def _spec(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert MCP's description of a tool to ours."""
    return {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}


def _text_of(answer: Mapping[str, Any]) -> str:
    """Return the text of MCP's answer to a call, or its error."""
    if answer.get("error"):
        return f"error: {answer['error'].get('message')}"
    content = (answer.get("result") or {}).get("content") or ()
    return "\n".join(part["text"] for part in content if part.get("type") == "text")
