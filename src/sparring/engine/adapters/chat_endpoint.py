"""`ChatEndpoint`: client of a chat-completions API, text in and text out, for uses without token ids, such as
demonstrations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import httpx

from sparring.engine.adapters.client import authorization, is_refusal
from sparring.errors import EngineError, LimitReached, PromptTooLong, RequestRefused, boundary
from sparring.generation import Sampling
from sparring.render.dialect import message_dicts, tool_call, tool_dicts
from sparring.types import Message, ToolSpec
from sparring.validation import read_json

CONNECT_S = 10.0

TOO_LARGE = 413
"""HTTP status of a request that is too large, whatever the body of the answer says."""

_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|maximum (?:prompt|model|input) length|number of tokens allowed"
    r"|(?:prompt|input|messages) (?:is|are) too (?:long|large)|`inputs` tokens",
    re.IGNORECASE,
)
"""Error texts of servers for a prompt that is too long: OpenAI and its imitators, vLLM, SGLang, llama.cpp, TGI, and
vendors with such an API in addition to their own."""

_LENGTH = re.compile(r"(?<![\w.-])\d[\d,]{2,}(?![\w-])")
"""Number of tokens in such an error text."""


class ChatEndpoint:
    """Client of one model at `<url>/chat/completions`.

    Args:
        url: URL of the API, ending in `/v1`.
        api_key: key sent as a bearer token; "" for none.
    """

    def __init__(self, url: str, *, model: str, api_key: str = "") -> None:
        self._url, self._model = url, model
        headers = authorization(api_key)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S))

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling) -> Message:
        """Return the next message, with its reasoning if the server sends it (`reasoning_content` or `reasoning`).

        Raises:
            LimitReached: the reply was cut short at `max_tokens`.
            PromptTooLong: the server reports that the prompt is longer than its context.
            RequestRefused: the server refuses the request for another reason.
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
            if answer.is_error:
                raise _failure(f"chat endpoint {self._url}", answer)
            choice = answer.json()["choices"][0]
            reply = _message(choice["message"])
        if choice.get("finish_reason") == "length":
            raise LimitReached("max_tokens", f"a reply was cut short after {sampling.max_tokens} tokens")
        return reply

    async def close(self) -> None:
        """Close the connections. Safe to call twice."""
        await self._client.aclose()


def _failure(where: str, answer: httpx.Response) -> EngineError:
    status, text = answer.status_code, answer.text
    problem = f"{where}: {status}: {text[:300]}"
    if not is_refusal(status):
        return EngineError(problem)
    if status != TOO_LARGE and _TOO_LONG.search(text) is None:
        return RequestRefused(problem)
    lengths = [int(number.replace(",", "")) for number in _LENGTH.findall(text)][:2]
    differ = len(set(lengths)) == 2
    return PromptTooLong(problem, (max(lengths), min(lengths)) if differ else None)


def _message(message: dict[str, Any]) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        written = call["function"].get("arguments") or "{}"
        if isinstance(written, str) and not written.strip():  # no arguments, as clients of the gateway send them
            written = "{}"
        try:
            arguments = read_json(written) if isinstance(written, str) else written
        except ValueError:
            arguments = None
        calls.append(tool_call(call["id"], call["function"].get("name"), arguments, str(written)))
    return Message(
        role="assistant",
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
        tool_calls=tuple(calls),
    )
