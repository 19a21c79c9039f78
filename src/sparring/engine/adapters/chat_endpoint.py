"""`ChatEndpoint`: client of a chat-completions API, text in and text out, where no token ids are needed, such as for
demonstrations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from sparring.errors import EngineError, LimitReached, RequestRefused, boundary
from sparring.generation import Sampling
from sparring.render.dialect import message_dicts, tool_call, tool_dicts
from sparring.types import Message, ToolSpec

CONNECT_S = 10.0


class ChatEndpoint:
    """Client of one model behind `<url>/chat/completions`.

    Args:
        url: of the API, ending in `/v1`.
        model: its name at the server.
        api_key: sent as a bearer token, "" for none.
    """

    def __init__(self, url: str, *, model: str, api_key: str = "") -> None:
        self._url, self._model = url, model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S))

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling) -> Message:
        """Return the next message, with its reasoning where the server sends it (`reasoning_content` or `reasoning`).

        Raises:
            LimitReached: the reply was cut short at `max_tokens`.
            RequestRefused: the server refuses the request.
            EngineError: the server failed, is unreachable, or does not answer in this format.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "messages": message_dicts(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed % (1 << 31),
        }
        if tools:
            body["tools"] = tool_dicts(tools)
        with boundary(EngineError, f"chat endpoint {self._url}"):
            answer = await self._client.post("chat/completions", json=body)
            if 400 <= answer.status_code < 500 and answer.status_code not in (408, 429):
                raise RequestRefused(f"chat endpoint {self._url}: {answer.status_code}: {answer.text[:300]}")
            choice = answer.raise_for_status().json()["choices"][0]
            reply = _message(choice["message"])
        if choice.get("finish_reason") == "length":
            raise LimitReached("max_tokens", f"a reply was cut short after {sampling.max_tokens} tokens")
        return reply

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        await self._client.aclose()


def _message(message: dict[str, Any]) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        written = call["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(written) if isinstance(written, str) else written
        except ValueError:
            arguments = None
        calls.append(tool_call(call["id"], call["function"].get("name"), arguments, str(written)))
    return Message(
        role="assistant",
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
        tool_calls=tuple(calls),
    )
